// Puts the views together.

const report = readReport();
const timeline = timelineView(report, (name) => {
  if (values.find(name)) byId("values").scrollIntoView({ behavior: "smooth", block: "start" });
  timeline.select(new Set([name]));
});
const values = valuesView(report, (names) => timeline.select(names));
const modules = modulesView();

function showGraph(index) {
  const graph = report.graphs[index];
  timeline.show(graph);
  values.show(graph);
  modules.show(graph);
}

if (report.graphs.length) {
  const choice = byId("graph");
  report.graphs.forEach((graph, i) => {
    const option = make("option", "", graph.name);
    option.value = i;
    choice.append(option);
  });
  byId("graph-choice").hidden = report.graphs.length < 2;
  const highest = report.graphs.reduce((best, g, i, all) => (g.predicted_peak_nbytes > all[best].predicted_peak_nbytes ? i : best), 0);
  choice.value = highest;
  choice.addEventListener("change", () => showGraph(Number(choice.value)));
  showGraph(highest);
}
curveView(report);

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  timeline.draw();
}

byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
