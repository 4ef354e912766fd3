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
const main = document.querySelector("main");
const draw = (specs) => Promise.all(Object.entries(specs).map(([name, spec]) =>
  vegaEmbed(document.getElementById(name),
    { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container",
      autosize: { type: "fit-x", contains: "padding" }, ...spec },
    { renderer: "svg", actions: false, config, tooltip: { theme: "custom" } }))).then(
  (drawn) => { document.body.dataset.drawn = drawn.length; },
  (error) => { document.body.dataset.failed = String(error); console.error(error); });
draw(JSON.parse(document.getElementById("specs").textContent));

// a page of `hf-zero report --serve`: asks for the run again
const { refresh, version } = document.body.dataset;
const footer = document.querySelector("footer");
const update = async (known) => {
  try {
    const answer = await fetch("run.json", { headers: { "If-None-Match": known } });
    if (answer.status === 200) {
      const found = await answer.json();
      const open = [...main.querySelectorAll("details")].map((each) => each.open);
      main.style.minHeight = `${main.offsetHeight}px`;  // the page does not scroll meanwhile
      document.title = found.title;
      main.innerHTML = found.body;
      main.querySelectorAll("details").forEach((each, place) => { each.open = open[place] ?? false; });
      await draw(found.specs);
      main.style.minHeight = "";
      known = answer.headers.get("ETag");
    }
    footer.textContent = "hf-zero report, refreshed while the run writes";
  } catch {
    footer.textContent = "hf-zero report: the server has ended";
  }
  setTimeout(update, 1000 * refresh, known);
};
if (refresh) setTimeout(update, 1000 * refresh, version);
