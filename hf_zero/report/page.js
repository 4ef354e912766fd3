const ink = { labelColor: "var(--faint)", titleColor: "var(--faint)", domainColor: "var(--line)",
  tickColor: "var(--line)", gridColor: "var(--grid)", labelFontSize: 11, titleFontSize: 11,
  titleFontWeight: "normal", labelFont: "inherit", titleFont: "inherit" };
const config = {
  background: "transparent",
  font: "system-ui, sans-serif",
  view: { stroke: "transparent" },
  axis: ink,
  axisX: { grid: false },
  legend: { labelColor: "var(--ink)", titleColor: "var(--faint)", labelFontSize: 11, symbolSize: 90,
    symbolStrokeWidth: 2, symbolBaseStrokeColor: "var(--ink)", padding: 0, offset: 8 },
  point: { color: "var(--c1)" },
};
const specs = JSON.parse(document.getElementById("specs").textContent);
const drawn = Object.entries(specs).map(([name, spec]) =>
  vegaEmbed(document.getElementById(name),
    { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container",
      autosize: { type: "fit-x", contains: "padding" }, ...spec },
    { renderer: "svg", actions: false, config, tooltip: { theme: "custom" } }));
Promise.all(drawn).then(
  () => { document.body.dataset.drawn = drawn.length; },
  (error) => { document.body.dataset.failed = String(error); console.error(error); });
