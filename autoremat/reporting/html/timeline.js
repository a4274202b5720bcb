// The memory timeline: a canvas of stacked areas with a cursor, and the inspector beside it.

function timelineView(report, onValue) {
  const canvas = byId("chart");
  const context = canvas.getContext("2d");
  const margin = { left: 62, right: 14, top: 34, bottom: 50 };
  const LANE = 9; // pixels of a lane of the link, its gap included
  let timeline = null;
  let graph = null;
  let cursor = 0;
  let byTime = true;
  let selected = new Set();
  let width = 0;
  let height = 0;
  let ceiling = 1;

  const plotWidth = () => width - margin.left - margin.right;
  const hasLink = () => timeline.copies.out.length > 0;
  const linkHeight = () => (hasLink() ? 2 * LANE + 4 : 0);
  const plotHeight = () => height - margin.top - margin.bottom - linkHeight();
  const totalOf = (ends) => (ends.length ? ends[ends.length - 1] : 0);
  const wholeTime = () => Math.max(totalOf(timeline.ends), totalOf(timeline.baselineEnds), 1e-9);
  const usesTime = () => byTime && totalOf(timeline.ends) > 0;
  const begunAt = (step) => (step ? timeline.ends[step - 1] : 0);
  const startOf = (step) => (usesTime() ? begunAt(step) / wholeTime() : step / timeline.count);
  const endOf = (step) => (usesTime() ? timeline.ends[step] / wholeTime() : (step + 1) / timeline.count);
  const x = (fraction) => margin.left + fraction * plotWidth();

  /** Where a moment lies: in time, or within the step that it falls into. */
  function xOfMoment(us) {
    if (usesTime()) return x(us / wholeTime());
    const step = firstStep((one) => timeline.ends[one] > us);
    const takes = timeline.ends[step] - begunAt(step);
    return x((step + (takes > 0 ? Math.min(1, (us - begunAt(step)) / takes) : 0)) / timeline.count);
  }
  const y = (nbytes) => margin.top + plotHeight() * (1 - nbytes / ceiling);

  /** Bytes at the upper end of the vertical axis. */
  function highestDrawn() {
    let highest = Math.max(timeline.live_nbytes[timeline.peak], graph.predicted_peak_nbytes);
    if (usesTime()) for (const n of timeline.baseline_live_nbytes) highest = Math.max(highest, n);
    // A budget far above everything would flatten the picture.
    if (report.budget_nbytes < 1.6 * highest) highest = Math.max(highest, report.budget_nbytes);
    return highest * 1.04;
  }

  /** The first step behind a place, if all that follow are behind it too; else the last one. */
  function firstStep(isBehind) {
    let low = 0;
    let high = timeline.count - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isBehind(middle)) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** The step that ends after a fraction of the width. */
  const stepAt = (fraction) => firstStep((step) => endOf(step) > fraction);

  /** In each of `count` columns the step with the most live bytes: no peak is lost. */
  function columns(live, startOf, endOf, count) {
    const found = new Int32Array(count).fill(-1);
    for (let step = 0; step < live.length; step++) {
      const first = Math.min(count - 1, Math.floor(startOf(step) * count));
      const last = Math.min(count - 1, Math.max(first, Math.ceil(endOf(step) * count) - 1));
      for (let column = first; column <= last; column++) {
        if (found[column] < 0 || live[step] > live[found[column]]) found[column] = step;
      }
    }
    return found;
  }

  const ratio = () => window.devicePixelRatio || 1;

  function draw() {
    if (!timeline) return;
    const box = canvas.getBoundingClientRect();
    width = box.width;
    height = box.height;
    if (width < 40) return;
    canvas.width = Math.round(width * ratio());
    canvas.height = Math.round(height * ratio());
    context.setTransform(ratio(), 0, 0, ratio(), 0, 0);
    ceiling = highestDrawn();
    const colour = colours();
    context.clearRect(0, 0, width, height);
    context.font = "11px " + getComputedStyle(document.body).fontFamily;
    drawGrid(colour);
    drawAreas(colour);
    if (usesTime()) drawBaseline(colour);
    drawLevels(colour);
    drawPhases(colour);
    if (hasLink()) drawLink(colour);
    drawPeak(colour);
    drawCursor(colour);
  }

  function drawGrid(colour) {
    const marks = ticks(ceiling, Math.max(3, Math.round(plotHeight() / 60)));
    context.textBaseline = "middle";
    for (const mark of marks) {
      context.fillStyle = colour("line");
      context.fillRect(margin.left, Math.round(y(mark)), plotWidth(), 1);
      context.fillStyle = colour("muted");
      context.textAlign = "right";
      context.fillText(tickText(mark, marks[1] || 1, sizeText), margin.left - 8, y(mark));
    }
    context.textBaseline = "alphabetic";
    const axis = height - 4;
    const whole = usesTime() ? wholeTime() : timeline.count;
    const steps = ticks(whole, Math.max(2, Math.round(plotWidth() / 130)));
    for (const mark of steps) {
      const at = x(mark / whole);
      context.textAlign = mark === 0 ? "left" : at > width - 40 ? "right" : "center";
      const text = usesTime() ? tickText(mark, steps[1] || 1, timeText) : mark.toLocaleString("en");
      context.fillText(text, Math.min(at, width - 2), axis);
    }
  }

  function drawAreas(colour) {
    const scale = ratio();
    const found = columns(timeline.live_nbytes, startOf, endOf, Math.max(1, Math.floor(plotWidth() * scale)));
    context.save();
    context.setTransform(1, 0, 0, 1, 0, 0);
    const left = Math.round(margin.left * scale);
    const base = y(0) * scale;
    const perByte = (plotHeight() * scale) / ceiling;
    const under = new Float64Array(found.length);
    for (const kind of timeline.kinds) {
      const bytes = timeline.perKind[kind];
      context.fillStyle = colour(kind);
      for (let column = 0; column < found.length; column++) {
        const step = found[column];
        if (step < 0 || bytes[step] <= 0) continue;
        const bottom = Math.round(base - under[column] * perByte);
        under[column] += bytes[step];
        const top = Math.round(base - under[column] * perByte);
        if (bottom > top) context.fillRect(left + column, top, 1, bottom - top);
      }
    }
    context.restore();
  }

  function drawBaseline(colour) {
    const { baseline_live_nbytes: live, baselineEnds: ends } = timeline;
    if (!live.length) return;
    const count = Math.max(1, Math.floor(plotWidth()));
    const whole = wholeTime();
    const found = columns(live, (step) => (step ? ends[step - 1] : 0) / whole, (step) => ends[step] / whole, count);
    context.beginPath();
    context.moveTo(margin.left, y(timeline.resident_nbytes));
    found.forEach((step, column) => {
      if (step < 0) return;
      context.lineTo(margin.left + column, y(live[step]));
      context.lineTo(margin.left + column + 1, y(live[step]));
    });
    context.setLineDash([]);
    context.lineWidth = 1.25;
    context.strokeStyle = colour("ghost");
    context.stroke();
  }

  /** The budget, and the peak of the generated code where it is another one. */
  function drawLevels(colour) {
    const levels = [[report.budget_nbytes, "budget", "budget"]];
    if (graph.predicted_peak_nbytes !== timeline.live_nbytes[timeline.peak]) {
      levels.push([graph.predicted_peak_nbytes, "peak of generated code", "muted"]);
    }
    for (const [nbytes, name, style] of levels) {
      if (nbytes > ceiling) continue;
      const isBudget = style === "budget";
      const at = Math.round(y(nbytes)) + 0.5;
      context.setLineDash(isBudget ? [6, 4] : [2, 3]);
      context.lineWidth = 1.5;
      context.strokeStyle = colour(style);
      context.beginPath();
      context.moveTo(margin.left, at);
      context.lineTo(width - margin.right, at);
      context.stroke();
      // On different sides, and away from each other: the two may be close.
      const above = isBudget ? nbytes >= graph.predicted_peak_nbytes : nbytes > report.budget_nbytes;
      const text = `${name} ${sizeText(nbytes)}`;
      const end = width - margin.right - 4;
      const peak = x((startOf(timeline.peak) + endOf(timeline.peak)) / 2);
      const hidesPeak = Math.abs(end - peak - context.measureText(text).width / 2) < context.measureText(text).width / 2 + 8;
      const side = isBudget ? (hidesPeak ? peak - 10 : end) : margin.left + 6;
      labelAt(text, side, above ? at - 6 : at + 14, isBudget ? "right" : "left", colour, style);
    }
    context.setLineDash([]);
  }

  function labelAt(text, left, bottom, align, colour, style) {
    context.textAlign = align;
    context.lineJoin = "round";
    context.lineWidth = 4;
    context.setLineDash([]);
    context.strokeStyle = colour("panel");
    context.strokeText(text, left, bottom);
    context.fillStyle = colour(style);
    context.fillText(text, left, bottom);
  }

  const stripTop = () => margin.top + plotHeight() + 6;

  function drawPhases(colour) {
    const top = stripTop();
    const parts = [["forward", 0, timeline.backwardStart], ["backward", timeline.backwardStart, timeline.count]];
    for (const [name, first, end] of parts) {
      if (end <= first) continue;
      const left = x(startOf(first));
      const right = x(endOf(end - 1));
      context.fillStyle = colour("strip");
      context.fillRect(left, top, Math.max(0, right - left - 1), 18);
      if (right - left > 60) {
        context.fillStyle = colour("muted");
        context.textAlign = "left";
        context.fillText(name, left + 6, top + 13);
      }
    }
    context.fillStyle = colour("recomputed");
    for (let step = timeline.backwardStart; step < timeline.count; step++) {
      if (!timeline.steps.is_recompute[step]) continue;
      const left = x(startOf(step));
      context.fillRect(left, top + 14, Math.max(1, x(endOf(step)) - left), 4);
    }
    context.fillStyle = colour("stall");
    timeline.steps.stall_us.forEach((us, step) => {
      if (!us) return;
      const left = xOfMoment(begunAt(step));
      context.fillRect(left, top, Math.max(1, xOfMoment(begunAt(step) + us) - left), 14);
    });
    if (!selected.size) return;
    const { spans } = timeline;
    for (let i = 0; i < spans.value.length; i++) {
      if (!selected.has(spans.value[i])) continue;
      context.fillStyle = colour(spans.kind[i]);
      const left = x(startOf(spans.born[i]));
      context.fillRect(left, top - 5, Math.max(2, x(endOf(spans.last[i])) - left), 4);
    }
  }

  /** The link's lanes: what leaves above, what comes back below. */
  function drawLink(colour) {
    context.textAlign = "right";
    ["out", "back"].forEach((way, lane) => {
      const top = stripTop() + 22 + lane * LANE;
      context.fillStyle = colour("strip");
      context.fillRect(margin.left, top, plotWidth(), LANE - 2);
      context.fillStyle = colour("muted");
      context.font = "9px " + getComputedStyle(document.body).fontFamily;
      context.fillText(way === "out" ? "to the host" : "back", margin.left - 8, top + LANE - 2);
      for (const copy of timeline.copies[way]) {
        const left = xOfMoment(copy.begins);
        context.fillStyle = colour(selected.has(copy.value) ? "ink" : "fetched");
        // Copies follow each other without a pause: a gap tells them apart where there is room.
        const room = xOfMoment(copy.ends) - left;
        context.fillRect(left, top, Math.max(1, room > 4 ? room - 1 : room), LANE - 2);
      }
    });
    context.font = "11px " + getComputedStyle(document.body).fontFamily;
  }

  function drawPeak(colour) {
    const peak = timeline.peak;
    const at = x((startOf(peak) + endOf(peak)) / 2);
    const top = y(timeline.live_nbytes[peak]);
    context.strokeStyle = colour("ink");
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(at, 20);
    context.lineTo(at, top - 5);
    context.stroke();
    context.beginPath();
    context.arc(at, top, 4, 0, 2 * Math.PI);
    context.fillStyle = colour("panel");
    context.fill();
    context.lineWidth = 2;
    context.stroke();
    const size = `peak ${sizeText(timeline.live_nbytes[peak])}`;
    context.font = "600 12px " + getComputedStyle(document.body).fontFamily;
    let text = `${size} at ${timeline.steps.name[peak]}`;
    if (context.measureText(text).width > width - 20) text = size;
    const half = context.measureText(text).width / 2;
    const centre = Math.min(Math.max(at, half + 4), width - half - 4);
    labelAt(text, centre, 14, "center", colour, "ink");
    context.font = "11px " + getComputedStyle(document.body).fontFamily;
  }

  function drawCursor(colour) {
    const left = x(startOf(cursor));
    const right = Math.max(left + 1.5, x(endOf(cursor)));
    const top = margin.top - 6;
    context.fillStyle = colour("cursor");
    context.globalAlpha = right - left > 6 ? 0.4 : 1;
    context.fillRect(left, top, right - left, plotHeight() + 30 + linkHeight());
    context.globalAlpha = 1;
  }

  function inspect() {
    const { steps } = timeline;
    const panel = byId("inspector");
    const tags = make("p", "tags");
    tags.append(make("span", "tag", steps.is_backward[cursor] ? "backward" : "forward"));
    if (steps.is_recompute[cursor]) tags.append(make("span", "tag recomputed", "recompute"));
    if (steps.is_estimated[cursor]) tags.append(make("span", "tag", "time estimated"));
    if (steps.stall_us[cursor]) tags.append(make("span", "tag stall", `waits ${timeText(steps.stall_us[cursor])} for a copy`));
    const where = [steps.module[cursor], steps.source[cursor]].filter(Boolean).join("  ·  ");
    const place = make("p", "place", where || "\u00a0");
    place.title = where;
    const title = make("p", "op", steps.op[cursor] || steps.name[cursor]);
    title.title = steps.name[cursor];
    const live = make("p", "live", "", make("b", "", sizeText(timeline.live_nbytes[cursor])), ` live, ${timeText(steps.time_us[cursor])}`);
    const parts = make("ul", "parts");
    for (const kind of [...timeline.kinds].reverse()) {
      const bytes = timeline.perKind[kind][cursor];
      const swatch = make("i");
      swatch.style.background = `var(--${kind})`;
      parts.append(make("li", bytes > 0 ? "" : "none", "", swatch, make("span", "", KIND_NAMES[kind]), make("b", "", bytes > 0 ? sizeText(bytes) : "\u2013")));
    }
    if (hasLink()) {
      const flying = flyingAt(timeline, cursor);
      const texts = [["to the host", flying.out], ["back", flying.back]].filter(([, bytes]) => bytes);
      const text = texts.map(([way, bytes]) => `${sizeText(bytes)} ${way}`).join(", ") || "\u2013";
      parts.append(make("li", texts.length ? "" : "none", "", make("i"), make("span", "", "On the way"), make("b", "", text)));
    }
    const { count, largest } = liveAt(timeline, cursor, 6);
    const list = make("ol", "largest");
    for (let row = 0; row < 6; row++) {
      const i = largest[row];
      if (i === undefined) {
        list.append(make("li", "none", "\u00a0"));
        continue;
      }
      const swatch = make("i");
      swatch.style.background = `var(--${timeline.spans.kind[i]})`;
      const name = timeline.spans.value[i];
      const module = timeline.moduleOf.get(name) || "";
      const label = make("span", "", name, make("span", "where", `  ${module.split(".").slice(-3).join(".")}`));
      const button = make("button", "quiet", "", swatch, label, make("b", "", sizeText(timeline.spans.nbytes[i])));
      button.type = "button";
      button.title = [name, timeline.spans.kind[i], module].filter(Boolean).join("\n");
      button.addEventListener("click", () => onValue(name));
      list.append(make("li", "", "", button));
    }
    panel.replaceChildren(
      make("p", "step", `Step ${(cursor + 1).toLocaleString("en")} of ${timeline.count.toLocaleString("en")}`),
      title, place, tags, live, parts, make("h3", "", `Largest of ${countText(count, "live value")}`), list,
    );
    canvas.setAttribute("aria-valuenow", cursor + 1);
    canvas.setAttribute("aria-valuetext", `Step ${cursor + 1}, ${steps.op[cursor]}, ${sizeText(timeline.live_nbytes[cursor])} live`);
  }

  function moveTo(step) {
    cursor = Math.max(0, Math.min(timeline.count - 1, step));
    draw();
    inspect();
  }

  function legend() {
    byId("legend").replaceChildren(
      ...timeline.kinds.filter((kind) => timeline.perKind[kind].some((n) => n > 0)).map((kind) => {
        const swatch = make("i");
        swatch.style.background = `var(--${kind})`;
        return make("li", "", "", swatch, KIND_NAMES[kind]);
      }),
      make("li", usesTime() ? "" : "hidden", "", make("i", "ghost-line"), "Without a plan"),
      make("li", timeline.steps.stall_us.some((us) => us > 0) ? "" : "hidden", "", make("i", "stall"), "Waiting for a copy"),
      make("li", selected.size ? "" : "hidden", "", make("i", "lifetime"), `Under the chart: lifetime of ${countText(selected.size, "selected value")}`),
    );
  }

  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const fraction = (event.clientX - box.left - margin.left) / plotWidth();
    if (fraction < 0 || fraction > 1) return;
    // Of the steps under the pointer, the one that is drawn: the highest.
    const half = 0.5 / plotWidth();
    const last = stepAt(Math.min(1, fraction + half));
    let best = stepAt(Math.max(0, fraction - half));
    for (let step = best; step <= last; step++) {
      if (timeline.live_nbytes[step] > timeline.live_nbytes[best]) best = step;
    }
    if (best !== cursor) moveTo(best);
  });
  canvas.addEventListener("keydown", (event) => {
    const far = Math.max(1, Math.round(timeline.count / 20));
    const stride = event.shiftKey ? 10 : 1;
    const moves = {
      ArrowRight: cursor + stride, ArrowUp: cursor + stride, ArrowLeft: cursor - stride, ArrowDown: cursor - stride,
      PageUp: cursor + far, PageDown: cursor - far, Home: 0, End: timeline.count - 1, p: timeline.peak,
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in moves)) return;
    event.preventDefault();
    moveTo(moves[event.key]);
  });
  for (const [id, time] of [["by-time", true], ["by-step", false]]) {
    byId(id).addEventListener("click", () => {
      byTime = time;
      byId("by-time").setAttribute("aria-pressed", String(time));
      byId("by-step").setAttribute("aria-pressed", String(!time));
      legend();
      draw();
    });
  }
  new ResizeObserver(draw).observe(canvas);

  return {
    draw,
    show(chosen) {
      graph = chosen;
      timeline = chosen.timeline && chosen.timeline.count ? chosen.timeline : null;
      byId("timeline").hidden = !timeline;
      if (!timeline) return;
      canvas.setAttribute("aria-valuemax", timeline.count);
      legend();
      moveTo(timeline.peak);
    },
    select(names) {
      selected = names;
      legend();
      draw();
    },
  };
}
