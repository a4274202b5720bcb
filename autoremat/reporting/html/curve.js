// Peak against time: other plans, classic strategies, and the chosen point.

function curveView(report) {
  const NAMES = { plan: "Plans of autoremat", offload: "The same, values may wait elsewhere", chosen: "This plan", strategy: "Classic strategies", torch: "torch.compile" };
  const holder = byId("curve-plot");
  const svgTag = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  function shape(kind, x, y) {
    if (kind === "torch") return svgTag("rect", { x: x - 4.5, y: y - 4.5, width: 9, height: 9, class: "point torch" });
    if (kind === "offload") return svgTag("path", { d: `M${x} ${y - 6}L${x + 6} ${y}L${x} ${y + 6}L${x - 6} ${y}Z`, class: "point offload" });
    if (kind === "strategy") return svgTag("path", { d: `M${x} ${y - 6}L${x + 6} ${y + 5}H${x - 6}Z`, class: "point strategy" });
    return svgTag("circle", { cx: x, cy: y, r: kind === "chosen" ? 7 : 4, class: `point ${kind}` });
  }

  /** Where a label fits beside its point without touching what is drawn, or null. */
  function place(text, x, y, width, taken, box) {
    const spots = [[10, 4, 0], [-10 - width, 4, 0], [-width / 2, -11, 0], [-width / 2, 20, 0]];
    for (const [dx, dy] of spots) {
      const rect = { left: x + dx, right: x + dx + width, top: y + dy - 11, bottom: y + dy + 3 };
      const inside = rect.left >= box.left && rect.right <= box.right && rect.top >= box.top && rect.bottom <= box.bottom;
      const free = taken.every((other) => rect.right < other.left || rect.left > other.right || rect.bottom < other.top || rect.top > other.bottom);
      if (inside && free) return { rect, x: rect.left, y: y + dy };
    }
    return null;
  }

  function draw() {
    const points = report.curve;
    if (!points.length) return;
    const width = Math.max(280, holder.clientWidth);
    const height = width < 560 ? 320 : 380;
    const box = { left: 66, right: width - 16, top: 18, bottom: height - 46 };
    const range = (numbers, room) => {
      const low = Math.min(...numbers);
      const high = Math.max(...numbers);
      const pad = (high - low || high || 1) * room;
      return [Math.max(0, low - pad), high + pad];
    };
    const [x0, x1] = range(points.map((p) => p.peak_nbytes).concat(report.budget_nbytes <= 1.5 * Math.max(...points.map((p) => p.peak_nbytes)) ? [report.budget_nbytes] : []), 0.08);
    const [y0, y1] = range(points.map((p) => p.time_us), 0.12);
    const x = (n) => box.left + ((n - x0) / (x1 - x0)) * (box.right - box.left);
    const y = (t) => box.bottom - ((t - y0) / (y1 - y0)) * (box.bottom - box.top);
    const svg = svgTag("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "Peak memory against step time" });
    holder.replaceChildren(svg, legendOf(points), tableOf(points)); // in the page, so that texts have a length
    const text = (content, attributes) => {
      const element = svgTag("text", attributes);
      element.textContent = content;
      svg.append(element);
      return element;
    };
    const marks = (low, high, count) => ticks(high - low, count).length > 1 ? ticks(high, Math.ceil((count * high) / (high - low))).filter((n) => n >= low) : [low];
    const ys = marks(y0, y1, 5);
    for (const mark of ys) {
      svg.append(svgTag("line", { x1: box.left, x2: box.right, y1: y(mark), y2: y(mark), class: "grid-line" }));
      text(tickText(mark, ys[1] - ys[0] || mark, timeText), { x: box.left - 8, y: y(mark) + 4, class: "axis end" });
    }
    const xs = marks(x0, x1, Math.max(2, Math.floor(width / 150)));
    for (const mark of xs) {
      svg.append(svgTag("line", { x1: x(mark), x2: x(mark), y1: box.bottom, y2: box.bottom + 5, class: "tick" }));
      text(tickText(mark, xs[1] - xs[0] || mark, sizeText), { x: x(mark), y: box.bottom + 19, class: "axis middle" });
    }
    text("peak memory", { x: box.right, y: height - 6, class: "axis end" });
    text("step time", { x: 2, y: 12, class: "axis" });
    const taken = [{ left: 0, right: 60, top: 0, bottom: 16 }];
    if (report.budget_nbytes >= x0 && report.budget_nbytes <= x1) {
      const at = x(report.budget_nbytes);
      svg.append(svgTag("line", { x1: at, x2: at, y1: box.top, y2: box.bottom, class: "budget-line" }));
      const label = text(`budget ${sizeText(report.budget_nbytes)}`, { x: at, y: 12, class: "budget-text middle" });
      const half = label.getComputedTextLength() / 2;
      label.setAttribute("x", Math.min(Math.max(at, half + 64), width - half));
      taken.push({ left: at - 1, right: at + 1, top: box.top, bottom: box.bottom });
    }
    // Through all that no other point beats, whoever found it: nothing that fits lies below the line.
    const own = [...points].sort((a, b) => a.peak_nbytes - b.peak_nbytes || a.time_us - b.time_us)
      .filter((p, i, all) => all.slice(0, i).every((other) => p.time_us < other.time_us));
    for (let i = 1; i < own.length; i++) {
      // Labels keep clear of the line: it is marked as taken, piece by piece.
      for (let part = 0; part <= 12; part++) {
        const at = (name) => own[i - 1][name] + ((own[i][name] - own[i - 1][name]) * part) / 12;
        const [px, py] = [x(at("peak_nbytes")), y(at("time_us"))];
        taken.push({ left: px - 2, right: px + 2, top: py - 2, bottom: py + 2 });
      }
    }
    if (own.length > 1) svg.append(svgTag("path", { d: own.map((p, i) => `${i ? "L" : "M"}${x(p.peak_nbytes)} ${y(p.time_us)}`).join(""), class: "frontier" }));
    const order = ["plan", "offload", "torch", "strategy", "chosen"];
    const sorted = [...points].sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind));
    for (const p of sorted) {
      const [px, py] = [x(p.peak_nbytes), y(p.time_us)];
      const mark = shape(p.kind, px, py);
      const title = svgTag("title", {});
      title.textContent = `${p.label}: ${sizeText(p.peak_nbytes)}, ${timeText(p.time_us)}`;
      mark.append(title);
      svg.append(mark);
      taken.push({ left: px - 7, right: px + 7, top: py - 7, bottom: py + 7 });
    }
    for (const p of sorted.reverse()) {
      if (p.kind === "plan" || p.kind === "offload") continue;
      const label = text(p.label, { x: 0, y: 0, class: `point-label ${p.kind}` });
      const spot = place(p.label, x(p.peak_nbytes), y(p.time_us), label.getComputedTextLength(), taken, box);
      if (!spot) {
        label.remove();
        continue;
      }
      label.setAttribute("x", spot.x);
      label.setAttribute("y", spot.y);
      taken.push(spot.rect);
    }
  }

  function legendOf(points) {
    const kinds = Object.keys(NAMES).filter((kind) => points.some((p) => p.kind === kind));
    return make("ul", "legend", "", ...kinds.map((kind) => {
      const icon = svgTag("svg", { viewBox: "0 0 16 16", width: 14, height: 14, "aria-hidden": "true" });
      icon.append(shape(kind, 8, 8));
      return make("li", "", "", icon, NAMES[kind]);
    }));
  }

  function tableOf(points) {
    const table = make("table");
    const heads = ["", "Peak", "Time", "Budget"].map((title) => make("th", "", title));
    table.append(make("thead", "", "", make("tr", "", "", ...heads)));
    const rows = [...points].sort((a, b) => a.peak_nbytes - b.peak_nbytes).map((p) => make("tr", p.kind, "",
      make("td", "", p.label), make("td", "", sizeText(p.peak_nbytes)), make("td", "", timeText(p.time_us)),
      make("td", "", p.budget_nbytes === null ? "" : sizeText(p.budget_nbytes))));
    table.append(make("tbody", "", "", ...rows));
    return make("details", "", "", make("summary", "", `All ${countText(points.length, "point")}`), table);
  }

  byId("curve").hidden = !report.curve.length && !byId("curve-left-out");
  draw();
  if (report.curve.length) {
    let drawn = holder.clientWidth;
    new ResizeObserver(() => {
      if (holder.clientWidth === drawn) return;
      drawn = holder.clientWidth;
      draw();
    }).observe(holder);
  }
}
