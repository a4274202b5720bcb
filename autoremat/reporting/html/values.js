// The table of values: sorted, searched, folded, and drawn only where it is seen.

const ACTIONS = { save: "saved", away: "away", recompute: "recomputed", free: "not needed" };

/** What each filter shows. The rest, values that the backward does not read, is often most of them. */
const FILTERS = {
  plan: { title: "Saved or recomputed", withAway: "Saved, away or recomputed", has: (action) => action !== "free" },
  save: { title: "Saved", has: (action) => action === "save" },
  away: { title: "Away", has: (action) => action === "away" },
  recompute: { title: "Recomputed", has: (action) => action === "recompute" },
  free: { title: "Not needed", has: (action) => action === "free" },
  all: { title: "All", has: () => true },
};

/** A module's path with the number of its layer left open. */
const layerPattern = (module) => module.replace(/(^|\.)\d+(?=\.|$)/g, "$1*");

function valuesView(report, onSelect) {
  const grid = byId("grid");
  const COLUMNS = [
    { key: "action", title: "Action", text: (row) => row.action },
    { key: "module", title: "Value", text: (row) => row.module || row.name },
    { key: "shape", title: "Shape", text: (row) => row.shape },
    { key: "nbytes", title: "Bytes", number: true },
    { key: "spares", title: "Spares", number: true },
    { key: "costs", title: "Costs", number: true },
    { key: "source", title: "Source", text: (row) => row.source },
    { key: "reason", title: "Why", text: (row) => row.reason },
  ];
  const state = { rows: [], shown: [], sort: "nbytes", down: true, filter: "plan", query: "", open: new Set(), active: 0, chosen: null };
  const body = make("div", "grid-body");
  const head = make("div", "grid-head");
  head.setAttribute("role", "row");
  body.setAttribute("role", "rowgroup");
  grid.append(head, body);

  for (const column of COLUMNS) {
    const cell = make("div", `cell ${column.key}`);
    cell.setAttribute("role", "columnheader");
    const button = make("button", "sort", column.title);
    button.type = "button";
    button.addEventListener("click", () => {
      state.down = state.sort === column.key ? !state.down : Boolean(column.number);
      state.sort = column.key;
      refresh();
    });
    cell.append(button);
    column.cell = cell;
    head.append(cell);
  }

  function rowOf(values, i) {
    const shape = values.shape[i].join("×") || "scalar";
    return {
      names: [values.name[i]], name: values.name[i], action: values.action[i], op: values.op[i],
      module: values.module[i], shape, dtype: values.dtype[i], source: values.source[i],
      reason: values.reason[i].replace(/(\d) us\b/g, "$1 µs"), runs: values.avoided_runs[i],
      nbytes: values.nbytes[i], each: values.nbytes[i], spares: values.avoided_us[i],
      costs: values.recomputes[i] * values.time_us[i], recomputes: values.recomputes[i], count: 1,
    };
  }

  function folded(rows) {
    const groups = new Map();
    for (const row of rows) {
      // Without a module nothing tells that two values are the same one of two layers.
      const place = row.module ? layerPattern(row.module) : row.name;
      const key = JSON.stringify([place, row.op, row.shape, row.dtype, row.action, row.source]);
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
    return [...groups].map(([key, members]) => (members.length === 1 ? members[0] : groupOf(key, members)));
  }

  function groupOf(key, members) {
    const sum = (name) => members.reduce((total, row) => total + row[name], 0);
    const first = members[0];
    const same = (name) => members.every((row) => row[name] === first[name]);
    return {
      ...first, key, members, count: members.length, module: layerPattern(first.module),
      names: members.flatMap((row) => row.names), nbytes: sum("nbytes"), spares: sum("spares"), costs: sum("costs"),
      recomputes: same("recomputes") ? first.recomputes : 0,
      reason: same("reason") ? `each: ${first.reason}` : sharedReason(first.action, members, sum),
    };
  }

  /** Why, for values of several layers that differ in it. */
  function sharedReason(action, members, sum) {
    if (action === "save") {
      const most = members.reduce((best, row) => (row.spares > best.spares ? row : best));
      return most.spares ? `each avoids up to ${countText(most.runs, "recompute")} of ${timeText(most.spares)} together` : most.reason;
    }
    if (action !== "recompute" || !sum("costs")) return mostCommon(members);
    return `${sum("recomputes")} recomputes of ${timeText(sum("costs"))} together free ${sizeText(sum("nbytes"))}`;
  }

  function mostCommon(members) {
    const counts = new Map();
    for (const row of members) counts.set(row.reason, (counts.get(row.reason) || 0) + 1);
    return `most: ${[...counts].sort((a, b) => b[1] - a[1])[0][0]}`;
  }

  function compare(one, other) {
    const column = COLUMNS.find((c) => c.key === state.sort);
    const [a, b] = column.number ? [one[state.sort], other[state.sort]] : [column.text(one), column.text(other)];
    const order = column.number ? a - b : a.localeCompare(b, "en", { numeric: true });
    return (state.down ? -order : order) || other.nbytes - one.nbytes;
  }

  function refresh(keepScroll = false) {
    const query = state.query.toLowerCase();
    const matches = (row) =>
      FILTERS[state.filter].has(row.action) &&
      (!query || `${row.name} ${row.module} ${row.op} ${row.source} ${row.shape} ${row.dtype} ${row.action}`.toLowerCase().includes(query));
    const found = state.rows.filter(matches);
    const top = (byId("fold").checked ? folded(found) : found).sort(compare);
    state.shown = top.flatMap((row) =>
      row.members && state.open.has(row.key) ? [row, ...row.members.sort(compare).map((m) => ({ ...m, inside: true }))] : [row]);
    state.most = top.reduce((most, row) => Math.max(most, row.nbytes), 1);
    state.active = Math.min(state.active, Math.max(0, state.shown.length - 1));
    for (const column of COLUMNS) {
      const sorted = column.key === state.sort;
      column.cell.setAttribute("aria-sort", sorted ? (state.down ? "descending" : "ascending") : "none");
    }
    grid.setAttribute("aria-rowcount", state.shown.length + 1);
    const nbytes = found.reduce((total, row) => total + row.nbytes, 0);
    byId("count").textContent = found.length
      ? `${countText(found.length, "value")}${top.length < found.length ? ` in ${countText(top.length, "row")}` : ""}, ${sizeText(nbytes)}`
      : "No value matches.";
    if (!keepScroll) grid.scrollTop = 0;
    drawRows();
  }

  /** As the style sheet has it for this width. */
  const rowHeight = () => parseFloat(getComputedStyle(grid).getPropertyValue("--row"));

  function drawRows() {
    const height = rowHeight();
    body.style.height = `${state.shown.length * height}px`;
    const first = Math.max(0, Math.floor(grid.scrollTop / height) - 4);
    const last = Math.min(state.shown.length, first + Math.ceil(grid.clientHeight / height) + 9);
    const rows = [];
    for (let i = first; i < last; i++) rows.push(rowElement(state.shown[i], i, height));
    body.replaceChildren(...rows);
  }

  function twoLines(key, above, below, title = "") {
    const cell = make("div", `cell ${key}`, "", make("div", "above", above), make("div", "below", below));
    cell.setAttribute("role", "cell");
    cell.title = title || [above, below].filter(Boolean).join("\n");
    return cell;
  }

  function rowElement(row, i, height) {
    const element = make("div", "grid-row");
    element.setAttribute("role", "row");
    element.setAttribute("aria-rowindex", i + 2);
    element.id = `value-row-${i}`;
    element.style.transform = `translateY(${i * height}px)`;
    if (i === state.active) element.classList.add("active");
    if (row.inside) element.classList.add("inside");
    if (state.chosen && row.names.some((name) => state.chosen.has(name)) && row.names.length <= state.chosen.size) element.classList.add("chosen");
    const badge = make("span", `badge ${row.action}`, ACTIONS[row.action] + (row.recomputes > 1 ? ` ×${row.recomputes}` : ""));
    const action = make("div", "cell action", "", badge);
    action.setAttribute("role", "cell");
    const bytes = twoLines("nbytes", sizeText(row.nbytes), row.count > 1 ? `${row.count} × ${sizeText(row.each)}` : "");
    const bar = make("div", `share ${row.action}`);
    bar.style.width = `${(100 * row.nbytes) / state.most}%`;
    bytes.append(bar);
    const place = row.module || row.name;
    const value = twoLines("module", place, row.module ? `${row.op}${row.count > 1 ? "" : `  ·  ${row.name}`}` : row.op);
    // Where it is too long, the end of a path says more than its beginning.
    const path = make("bdi", "", place);
    path.dir = "ltr";
    value.firstChild.replaceChildren(path);
    if (row.members) {
      const opened = state.open.has(row.key);
      element.setAttribute("aria-expanded", String(opened));
      value.classList.add(opened ? "opened" : "closed");
    }
    element.append(
      action, value, twoLines("shape", row.shape, row.dtype), bytes,
      twoLines("spares", row.spares ? timeText(row.spares) : "", ""),
      twoLines("costs", row.costs ? timeText(row.costs) : "", ""),
      twoLines("source", row.source.replace(/:\d+$/, ""), row.source.replace(/^.*:(\d+)$|^.*$/, (_, line) => (line ? `line ${line}` : "")), row.source), twoLines("reason", row.reason, "", row.reason),
    );
    element.addEventListener("click", () => activate(i));
    return element;
  }

  /** Marks a row's values on the timeline; a folded row opens or closes as well. */
  function activate(i) {
    const row = state.shown[i];
    if (!row) return;
    state.active = i;
    state.chosen = new Set(row.names);
    if (row.members) {
      if (!state.open.delete(row.key)) state.open.add(row.key);
    }
    onSelect(state.chosen);
    refresh(true);
  }

  function moveTo(i) {
    state.active = Math.max(0, Math.min(state.shown.length - 1, i));
    const height = rowHeight();
    const top = state.active * height;
    const room = grid.clientHeight - head.offsetHeight;
    if (top < grid.scrollTop) grid.scrollTop = top;
    if (top + height > grid.scrollTop + room) grid.scrollTop = top + height - room;
    drawRows();
    grid.setAttribute("aria-activedescendant", `value-row-${state.active}`);
  }

  grid.addEventListener("scroll", drawRows, { passive: true });
  grid.addEventListener("keydown", (event) => {
    if (event.target !== grid || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(grid.clientHeight / rowHeight()) - 2);
    const moves = {
      ArrowDown: state.active + 1, ArrowUp: state.active - 1, PageDown: state.active + page,
      PageUp: state.active - page, Home: 0, End: state.shown.length - 1,
    };
    if (event.key === "Enter" || event.key === " ") activate(state.active);
    else if (event.key in moves) moveTo(moves[event.key]);
    else return;
    event.preventDefault();
  });
  byId("search").addEventListener("input", (event) => {
    state.query = event.target.value.trim();
    refresh();
  });
  byId("fold").addEventListener("change", () => refresh());
  new ResizeObserver(drawRows).observe(grid);

  function filters() {
    const count = (filter) => state.rows.reduce((sum, row) => sum + Number(FILTERS[filter].has(row.action)), 0);
    byId("filters").replaceChildren(...Object.keys(FILTERS).filter(count).map((filter) => {
      const button = make("button", "", (count("away") && FILTERS[filter].withAway) || FILTERS[filter].title);
      button.type = "button";
      button.append(make("small", "", count(filter).toLocaleString("en")));
      button.setAttribute("aria-pressed", String(state.filter === filter));
      button.addEventListener("click", () => {
        state.filter = filter;
        filters();
        refresh();
      });
      return button;
    }));
  }

  return {
    show(graph) {
      state.rows = graph.values.name.map((_, i) => rowOf(graph.values, i));
      state.filter = state.rows.some((row) => FILTERS.plan.has(row.action)) ? "plan" : "all";
      state.open.clear();
      byId("values").hidden = !state.rows.length;
      filters();
      refresh();
    },
    /** Shows one value alone; false if the table does not have it. */
    find(name) {
      if (!state.rows.some((row) => row.name === name)) return false;
      state.query = name;
      state.filter = "all";
      byId("search").value = name;
      filters();
      refresh();
      state.chosen = new Set([name]);
      drawRows();
      return true;
    },
  };
}
