"use strict";
// Draws the blocks of charts on a page, each from the JSON inside it, and their controls.

const TITLES = { frames: "frames", updates: "updates", seconds: "seconds",
  clock: "time, UTC, as if it had never paused" };
const HOVER = "<br>%{x}: %{y}<extra></extra>";
const SMOOTH = 2; // percent of a run that its curve is a running mean over, as in scores
const settings = { axis: "", smooth: SMOOTH, logX: false, logY: false, off: new Set() };
const blocks = new Map(); // element to its JSON
const visible = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    entry.target.isNear = entry.isIntersecting;
    if (entry.isIntersecting) draw(entry.target);
  }
}, { rootMargin: "800px" });

function read(text) {
  const { arrays, block } = JSON.parse(text);
  const revive = (value) => {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(revive);
    if ("@" in value) return arrays[value["@"]];
    return Object.fromEntries(Object.entries(value).map(([key, x]) => [key, revive(x)]));
  };
  return revive(block);
}

// Build an element; text is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

function show(element) {
  const block = read(element.querySelector("script").textContent);
  const axes = block.axes.filter((axis) => curvesOf(block).some((x) => axis in x.curves));
  if (curvesOf(block).some((x) => x.start)) axes.push("clock");
  if (!settings.axis && axes.length) settings.axis = axes[0];
  if (!blocks.has(element)) element.append(make("div", { className: "panels" }));
  const heads = JSON.stringify([axes, block.legend]);
  if (element.heads !== heads) {
    element.querySelectorAll(":scope > .toolbar, :scope > .legend").forEach((x) => x.remove());
    const legend = block.legend.length ? [entries(block.legend)] : [];
    const controls = axes.length ? [toolbar(axes)] : [];
    element.lastElementChild.before(...controls, ...legend);
    element.heads = heads;
  }
  blocks.set(element, block);
  setControls(element);
  const panels = element.lastElementChild;
  while (panels.children.length > block.figures.length) panels.lastChild.remove();
  block.figures.forEach((figure, index) => {
    let panel = panels.children[index];
    if (!panel) {
      panel = make("div", { className: "panel", tabIndex: 0, onkeydown: move });
      panel.setAttribute("role", "figure");
      panels.append(panel);
    }
    panel.figure = figure;
    panel.axes = axes;
    panel.style.minHeight = `${figure.layout.height}px`;
    panel.setAttribute("aria-label", plain(figure.layout.title.text));
    if (panel.isNear) draw(panel); else visible.observe(panel);
  });
}

const curvesOf = (block) => block.figures.flatMap((figure) => figure.data)
  .map((trace) => trace.meta ?? {}).filter((meta) => meta.curves);
const plain = (text) => new DOMParser().parseFromString(text.replaceAll("<br>", " "), "text/html")
  .body.textContent;

function redraw() {
  for (const element of blocks.keys()) {
    if (!element.isConnected) { blocks.delete(element); continue; }
    setControls(element);
    for (const panel of element.lastElementChild.children) if (panel.isNear) draw(panel);
  }
}

function setControls(element) {
  for (const input of element.querySelectorAll("[data-off]"))
    input.checked = !settings.off.has(input.dataset.off);
  for (const input of element.querySelectorAll("[data-setting]")) {
    const value = settings[input.dataset.setting];
    if (input.type === "checkbox") input.checked = value; else input.value = value;
    if (input.selectedIndex === -1) input.selectedIndex = 0; // an axis of other charts alone
  }
}

// --- controls ------------------------------------------------------------------------------------

function toolbar(axes) {
  const change = (event) => {
    const input = event.target;
    settings[input.dataset.setting] = input.type === "checkbox" ? input.checked : input.value;
    redraw();
  };
  const control = (text, name, input) => {
    input.dataset.setting = name;
    input.addEventListener("input", change);
    return make("label", {}, text, input);
  };
  const options = axes.map((axis) => make("option", { value: axis, textContent: TITLES[axis] }));
  const slider = make("input", { type: "range", min: 0, max: 20, step: 1 });
  const box = () => make("input", { type: "checkbox" });
  return make("div", { className: "toolbar" },
    control("x axis ", "axis", make("select", {}, ...options)),
    control("smoothing ", "smooth", slider),
    control("log x ", "logX", box()), control("log y ", "logY", box()));
}

function entries(legend) {
  const names = legend.flatMap((entry) => [entry.label, ...entry.runs]);
  const toggle = (list, off) => {
    list.forEach((name) => settings.off[off ? "add" : "delete"](name));
    redraw();
  };
  const check = (name, ...before) => {
    const input = make("input", { type: "checkbox", checked: !settings.off.has(name) });
    input.dataset.off = name;
    input.onchange = () => toggle([name], !input.checked);
    return make("label", {}, input, ...before, name);
  };
  const items = legend.map((entry) => {
    const swatch = make("i");
    swatch.style.background = colorOf(entry.color, "var($)");
    const item = make("li", {}, check(entry.label, swatch));
    if (entry.runs.length) {
      const runs = entry.runs.map((name) => make("li", {}, check(name)));
      const summary = make("summary", { textContent: `${runs.length} runs` });
      item.append(make("details", {}, summary, make("ul", {}, ...runs)));
    }
    return item;
  });
  const list = make("ul", { className: "legend" }, ...items);
  if (legend.length > 12) {
    const filter = make("input", { type: "search", placeholder: "show those with ..." });
    filter.setAttribute("aria-label", "show those whose names have this text");
    filter.oninput = () => {
      const has = (entry) => [entry.label, ...entry.runs].some((x) => x.includes(filter.value));
      settings.off.clear();
      toggle(legend.filter((entry) => !has(entry)).map((entry) => entry.label), true);
    };
    const button = (text, off) => make("button", { textContent: text, onclick: () => toggle(names, off) });
    list.prepend(make("li", {}, filter, button("all", false), button("none", true)));
  }
  return list;
}

// Move and zoom with the keyboard: arrows, plus, minus, and 0 for all.
function move(event) {
  const steps = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.3, 0.3] };
  const panel = event.currentTarget;
  if (event.target !== panel || event.ctrlKey || event.metaKey || !panel._fullLayout) return;
  if (event.key === "0") {
    panel.view = null;
    Plotly.relayout(panel, { "xaxis.autorange": true, "yaxis.autorange": true });
  } else if (event.key in steps) {
    const axis = panel._fullLayout.xaxis, [low, high] = axis.range.map(axis.r2l);
    const range = [low, high].map((x, i) => axis.l2r(x + (high - low) * steps[event.key][i]));
    panel.view = { range, scale: panel._fullLayout.uirevision };
    Plotly.relayout(panel, { "xaxis.range": range });
  } else return;
  event.preventDefault();
}

// --- drawing -------------------------------------------------------------------------------------

function runningMean(values, percent) {
  const half = Math.floor(values.length * percent / 200);
  return half < 1 ? values : values.map((value, at) => {
    if (value === null) return null;
    const window = values.slice(Math.max(0, at - half), at + half + 1).filter((x) => x !== null);
    return window.reduce((sum, x) => sum + x, 0) / window.length;
  });
}

function colorOf(color, form) {
  return color.startsWith("--") ? form.replace("$", color) : color;
}

function themed(value) {
  if (typeof value === "string" && value.startsWith("--"))
    return getComputedStyle(document.documentElement).getPropertyValue(value).trim();
  if (value === null || typeof value !== "object" || typeof value[0] === "number") return value;
  if (Array.isArray(value)) return value.map(themed);
  return Object.fromEntries(Object.entries(value).map(([key, x]) => [key, themed(x)]));
}

// Whole numbers have whole ticks, and the small digits between powers of ten are few.
function ticks(traces, name, isLog, count) {
  if (isLog) return { nticks: 3 };
  const values = traces.flatMap((trace) => Array.from(trace[name] ?? [])).filter((x) => x !== null);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.every(Number.isInteger) || high - low > count) return { nticks: count };
  return low === 0 && high === 0 ? { dtick: 1, range: [0, 1] } : { dtick: 1 };
}

const axisOf = ({ axes }) => axes.includes(settings.axis) ? settings.axis : axes[0];

// Return a trace with the points that the controls ask for.
function chosen(trace, axis) {
  const meta = trace.meta ?? {}, { smooth, off } = settings;
  let { x, y } = trace, visible = !off.has(meta.group) && !off.has(meta.run);
  if (meta.curves) {
    const curve = meta.curves[axis === "clock" ? "seconds" : axis];
    [x, y] = curve ?? [[], []];
    if (axis === "clock") x = meta.start ? x.map((at) => meta.start + 1000 * at) : [];
    if (meta.smooth) y = runningMean(y, meta.smooth === "run" ? smooth : smooth - SMOOTH);
    visible &&= x.length > 0;
  }
  const about = Array.isArray(trace.text) ? "%{text}" : "%{meta}"; // one text is no text of points
  const hovertemplate = trace.hoverinfo === "skip" ? undefined : about + HOVER;
  const style = themed({ mode: "lines", hovertemplate, ...trace, meta: null, x: null, y: null });
  return { ...style, meta: trace.text, x, y, visible: Boolean(visible) };
}

// Draw a panel once what it draws already has ended; what changes meanwhile is drawn together.
async function draw(panel) {
  panel.isStale = true;
  if (panel.isBusy) return;
  panel.isBusy = true;
  try {
    while (panel.isStale) {
      panel.isStale = false;
      await render(panel);
    }
  } finally { panel.isBusy = false; }
}

async function render(panel) {
  const { data, layout } = panel.figure;
  const hasCurves = data.some((trace) => trace.meta?.curves);
  const axis = { gridcolor: "--line", zerolinecolor: "--line", linecolor: "--line", automargin: true };
  const over = axisOf(panel);
  const x = hasCurves ? { title: { text: TITLES[over] },
    type: over === "clock" ? "date" : settings.logX ? "log" : "linear" } : {};
  const y = hasCurves ? { type: settings.logY ? "log" : "linear" } : {};
  const traces = data.map((trace) => chosen(trace, over));
  const isLog = hasCurves ? settings.logY : layout.yaxis?.type === "log";
  const xTicks = x.type === "date" ? { nticks: 7 } : ticks(traces, "x", x.type === "log", 7);
  const yTicks = ticks(traces, "y", isLog, 6);
  const isSmall = traces.every((trace) => Array.from(trace.y).every((at) => !(Math.abs(at) > 0.01)));
  const extraLines = layout.title.text.split("<br>").length - 1; // plotly would cut them off
  const title = { x: 0.01, xanchor: "left", y: 1, yanchor: "top", yref: "container",
    pad: { t: 4 + 17 * extraLines } };
  const full = themed({
    hovermode: "closest", showlegend: false, barmode: "stack", dragmode: "zoom",
    paper_bgcolor: "--page", plot_bgcolor: "--page", autosize: true,
    uirevision: hasCurves ? JSON.stringify([over, settings.logX, settings.logY]) : "all",
    hoverlabel: { align: "left", namelength: -1 }, ...layout,
    font: { family: "system-ui, Segoe UI, Helvetica, Arial, sans-serif", size: 11, color: "--soft" },
    title: { ...title, font: { size: 13, color: "--text" }, ...layout.title },
    margin: { l: 44, r: 10, b: 36, ...layout.margin },
    xaxis: { ...axis, showgrid: false, zeroline: false, ...xTicks, exponentformat: "B", ...layout.xaxis, ...x },
    yaxis: { ...axis, ...yTicks, exponentformat: isSmall || isLog ? "power" : "B", ...layout.yaxis, ...y },
  });
  if (panel.view?.scale === full.uirevision) full.xaxis.range = [...panel.view.range];
  full.xaxis.title = { standoff: 6, ...full.xaxis.title };
  const name = plain(layout.title.text).replace(/[^\w-]+/g, "_");
  await Plotly.react(panel, traces, full, {
    responsive: true, displaylogo: false,
    toImageButtonOptions: { filename: name, scale: 2 },
    modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"], ["toImage", {
      name: "csv", title: "Download data as CSV", icon: Plotly.Icons.disk,
      click: () => download(`${name}.csv`, csv(panel)),
    }]],
  });
}

// Return the points that a panel shows; a text cannot become a formula of a spreadsheet.
function csv(panel) {
  const cell = (value) => typeof value === "number" ? value
    : `"${String(value ?? "").replace(/^[=+@-]/, "'$&").replaceAll('"', '""')}"`;
  const rows = panel.figure.data.map((trace) => [trace, chosen(trace, axisOf(panel))])
    .filter(([, { visible }]) => visible)
    .flatMap(([{ meta, name }, { x, y }]) => Array.from(x, (at, i) =>
      [meta?.group, meta?.run, name, at, y[i]].map(cell).join(",")));
  return ["group,run,part,x,y", ...rows].join("\r\n");
}

function download(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

document.querySelectorAll(".charts").forEach(show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
