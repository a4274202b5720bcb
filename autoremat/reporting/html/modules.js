// Bytes saved and time recomputed, module by module.

function modulesView() {
  const tree = byId("tree");
  const leaf = () => ({ saved: 0, again: 0, children: new Map() });

  function add(root, module, key, amount) {
    let node = root;
    node[key] += amount;
    for (const part of module ? module.split(".") : ["(outside modules)"]) {
      if (!node.children.has(part)) node.children.set(part, leaf());
      node = node.children.get(part);
      node[key] += amount;
    }
  }

  function build(graph) {
    const root = leaf();
    const { values, timeline } = graph;
    values.name.forEach((_, i) => {
      if (values.action[i] === "save") add(root, values.module[i], "saved", values.nbytes[i]);
    });
    if (timeline) {
      const { steps } = timeline;
      steps.name.forEach((_, i) => {
        if (steps.is_recompute[i]) add(root, steps.module[i], "again", steps.time_us[i]);
      });
    }
    return root;
  }

  /** A chain of modules with one child each, and nothing of their own, is one row. */
  function joined(name, node) {
    while (node.children.size === 1) {
      const [[part, child]] = node.children;
      if (child.saved !== node.saved || child.again !== node.again) break;
      name = name ? `${name}.${part}` : part;
      node = child;
    }
    return [name, node];
  }

  function bar(kind, amount, most, text) {
    const fill = make("i");
    fill.style.width = `${most ? (100 * amount) / most : 0}%`;
    fill.style.background = `var(--${kind})`;
    const cell = make("div", "measure", "", make("b", "", amount ? text : "–"), make("div", "rail", "", fill));
    cell.setAttribute("role", "gridcell");
    return cell;
  }

  function rows(node, depth, root) {
    const order = ([, a], [, b]) => b.saved / (root.saved || 1) + b.again / (root.again || 1) - a.saved / (root.saved || 1) - a.again / (root.again || 1);
    const fragment = document.createDocumentFragment();
    const children = [...node.children].map(([name, child]) => joined(name, child));
    const numbered = children.every(([name]) => /^\d/.test(name));
    const visible = children.filter(([, child]) => child.saved || child.again);
    if (!numbered) visible.sort(order);
    for (const [name, child] of visible) fragment.append(row(name, child, depth, root));
    return fragment;
  }

  function row(name, node, depth, root) {
    const holder = make("div", "branch");
    const inner = make("div", "inner");
    const opens = [...node.children.values()].some((child) => child.saved || child.again);
    const title = make(opens ? "button" : "span", "name");
    if (opens) title.type = "button";
    title.append(make("span", "twist", opens ? "▸" : ""), make("span", "path", name));
    title.style.paddingLeft = `${depth * 18 + 8}px`;
    const cell = make("div", "who", "", title);
    cell.setAttribute("role", "gridcell");
    const line = make("div", "tree-row", "", cell, bar("saved", node.saved, root.saved, sizeText(node.saved)), bar("recomputed", node.again, root.again, timeText(node.again)));
    line.setAttribute("role", "row");
    line.setAttribute("aria-level", depth + 1);
    holder.append(line, inner);
    if (!opens) return holder;
    const toggle = (open) => {
      line.setAttribute("aria-expanded", String(open));
      title.firstChild.textContent = open ? "▾" : "▸";
      inner.replaceChildren(open ? rows(node, depth + 1, root) : "");
    };
    title.addEventListener("click", () => toggle(line.getAttribute("aria-expanded") !== "true"));
    // Open what holds most of it, so that the layers are in sight.
    const share = Math.max(node.saved / (root.saved || 1), node.again / (root.again || 1));
    toggle(depth < 3 && share > 0.5 && node.children.size <= 24);
    return holder;
  }

  return {
    show(graph) {
      const root = build(graph);
      byId("modules").hidden = !(root.saved || root.again);
      const head = make("div", "tree-row tree-head", "", make("div", "who", "Module"), make("div", "measure", "", make("span", "", "Saved")), make("div", "measure", "", make("span", "", "Recomputed")));
      head.setAttribute("role", "row");
      for (const cell of head.children) cell.setAttribute("role", "columnheader");
      const all = joined("", root)[1];
      const [prefix] = joined("", root);
      tree.replaceChildren(head, prefix && all.children.size ? row(prefix, all, 0, root) : rows(root, 0, root));
    },
  };
}
