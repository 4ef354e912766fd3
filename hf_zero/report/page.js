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
let weight;  // of the past in a smooth curve, 0 to 0.99
let noisy = [];  // charts with smooth curves: their views, rows, and the fields that tell curves apart

// Rows with the exponential mean of each curve, without its bias towards 0 at the beginning.
const smoothed = (rows, fields) => {
  const curves = {};
  return rows.map((row) => {
    if (row.value === null) return { ...row, smooth: null };
    const curve = (curves[fields.map((field) => row[field])] ??= { sum: 0, mass: 0 });
    curve.sum = weight * curve.sum + (1 - weight) * row.value;
    curve.mass = weight * curve.mass + (1 - weight);
    return { ...row, smooth: curve.sum / curve.mass };
  });
};
const embed = async ([name, spec]) => {
  const rows = spec.data.values, fields = spec.usermeta?.smooth;
  const data = fields ? { ...spec.data, values: smoothed(rows, fields) } : spec.data;
  const place = document.getElementById(name);
  const legend = { ...config.legend, columns: Math.max(1, Math.floor((place.clientWidth - 120) / 100)) };
  const { view } = await vegaEmbed(place,
    { $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container",
      autosize: { type: "fit-x", contains: "padding" }, ...spec, data },
    { renderer: "svg", actions: false, config: { ...config, legend }, tooltip: { theme: "custom" } });
  if (fields) noisy.push({ view, rows, fields });
};
const draw = (specs) => {
  const slider = document.getElementById("smoothing");
  weight ??= Number(slider?.value ?? 0);
  if (slider) slider.value = slider.nextElementSibling.value = weight;
  noisy = [];
  return Promise.all(Object.entries(specs).map(embed)).then(
    (drawn) => { document.body.dataset.drawn = drawn.length; },
    (error) => { document.body.dataset.failed = String(error); console.error(error); });
};
main.addEventListener("input", ({ target }) => {
  if (target.id !== "smoothing") return;
  weight = Number(target.value);
  target.nextElementSibling.value = weight;
  for (const { view, rows, fields } of noisy) view.data("rows", smoothed(rows, fields)).runAsync();
});
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
