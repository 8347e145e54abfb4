"use strict";
// Draws each chart of a page by plotly, once it is near the window.

const style = getComputedStyle(document.documentElement);
const near = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    draw(target);
  }
}, { rootMargin: "800px" });

function draw(chart) {
  const color = (name) => JSON.stringify(style.getPropertyValue(JSON.parse(name)).trim());
  const text = chart.textContent.replace(/"--\w+"/g, color); // of a light or of a dark page
  let arrays;
  const { data, layout } = JSON.parse(text, (key, value) => {
    if (key === "arrays") arrays = value;
    return value?.["@"] === undefined ? value : arrays[value["@"]];
  });
  if (layout.grid) {
    const count = layout.grid.columns;
    const columns = Math.min(count, Math.max(1, Math.floor(chart.clientWidth / 320)));
    layout.grid = { ...layout.grid, columns, rows: Math.ceil(count / columns) };
    layout.grid.ygap = 80 / layout.height;
    layout.height = 70 + layout.height * layout.grid.rows;
  }
  const names = data.filter((trace) => trace.showlegend).length;
  const wide = Math.max(1, Math.floor(chart.clientWidth / (layout.legend.entrywidth + 50)));
  const room = names > 1 ? Math.min(190, 19 * Math.ceil(names / wide)) : 0;
  layout.height += room;
  layout.margin.t += room;
  chart.textContent = "";
  Plotly.newPlot(chart, data, layout, { responsive: true, displaylogo: false });
}

document.querySelectorAll(".chart").forEach((chart) => near.observe(chart));
