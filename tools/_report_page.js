"use strict";
(() => {
const page = JSON.parse(document.getElementById("data").textContent);
const shown = page.runs.map(() => true);
const kinds = { training: true, validation: true };
const MARGIN = { left: 62, right: 14, top: 16, bottom: 38 };
const MOST_MARKERS = 40;
const LARGEST = 1e300;  // beyond, differences overflow

const colour = (run) => run < 8 ? `var(--run-${run})` : `hsl(${(run * 137.5) % 360} 60% var(--tone))`;
const least = (values) => values.reduce((first, second) => Math.min(first, second));
const most = (values) => values.reduce((first, second) => Math.max(first, second));
const number = (value) => value === null ? NaN : Number(value);  // "NaN" and "Infinity" are texts

function element(name, attributes = {}, parent = null, text = null) {
  const node = document.createElement(name);
  return finish(node, attributes, parent, text);
}

function svgElement(name, attributes = {}, parent = null, text = null) {
  return finish(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, parent, text);
}

function finish(node, attributes, parent, text) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== null) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

// Numbers as text

function short(value, chart) {
  if (value === null || value === undefined) return "";
  value = Number(value);
  if (!Number.isFinite(value)) return String(value);
  if (chart.percent) return `${(100 * value).toFixed(2)}%`;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e9)) return value.toExponential(3);
  return value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1e4 ? 6 : 4 });
}

function tickText(value, chart) {
  if (chart.percent) return `${parseFloat((100 * value).toPrecision(6))}%`;
  if (value !== 0 && (Math.abs(value) < 1e-4 || Math.abs(value) >= 1e6)) {
    return value.toExponential().replace(/(\.\d{3})\d*/, "$1");
  }
  return parseFloat(value.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 });
}

// Scales

function linearTicks(low, high, wanted, whole = false) {
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const factors = whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  let step = power * factors.find((factor) => factor * power >= rough * 0.999);
  if (whole) step = Math.max(1, Math.round(step));
  const ticks = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index += 1) {
    ticks.push(index * step);
  }
  return ticks;
}

function logarithmicTicks(low, high) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first > 3 ? [1] : [1, 2, 5];
  const stride = Math.ceil((last - first) / 8);
  const ticks = [];
  for (let power = first; power <= last; power += stride) {
    for (const factor of factors) ticks.push(Number(`${factor}e${power}`));
  }
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  return inside.length > 1 ? inside : linearTicks(low, high, 4).filter((tick) => tick > 0);
}

function verticalScale(values, { logarithmic, fromZero }, bottom, top) {
  if (!values.length) return { ticks: [], at: () => bottom };
  const change = logarithmic ? Math.log10 : (value) => value;
  const back = logarithmic ? (value) => 10 ** value : (value) => value;
  let low = change(least(values)), high = change(most(values));
  const room = (high - low) * 0.05 || (logarithmic ? 0.05 : Math.abs(high) * 0.05) || 1;
  const startsAtZero = fromZero && !logarithmic && low >= 0;
  low = startsAtZero ? 0 : low - room;
  high += room;
  return {
    ticks: logarithmic ? logarithmicTicks(back(low), back(high)) : linearTicks(low, high, 6),
    at: (value) => bottom - (change(value) - low) / (high - low) * (bottom - top),
  };
}

// What a chart shows

function visibleSeries(chart) {
  const series = [];
  page.runs.forEach((run, index) => {
    if (!shown[index]) return;
    for (const kind of ["training", "validation"]) {
      const values = Object.hasOwn(run.columns, chart[kind]) ? run.columns[chart[kind]] : null;
      // What has no other side, as the learning rate, is no matter of training or validation.
      const single = !(chart.training && chart.validation);
      if (!values || !(single || kinds[kind])) continue;
      const points = run.epochs.map((epoch, place) => [epoch, values[place]]);
      series.push({ run: index, kind, single, points: points.filter(([, value]) => value !== null) });
    }
  });
  return series;
}

class Chart {
  constructor(chart, parent) {
    this.chart = chart;
    this.logarithmic = chart.logarithmic;
    this.epoch = null;
    this.figure = element("figure", { "data-chart": chart.training || chart.validation || "recipe" }, parent);
    const caption = element("figcaption", {}, this.figure);
    element("span", {}, caption, chart.title);
    const label = element("label", {}, caption);
    const box = element("input", { type: "checkbox" }, label);
    label.append(" log scale");
    box.checked = this.logarithmic;
    box.addEventListener("change", () => { this.logarithmic = box.checked; this.draw(); });
    const plot = element("div", { class: "plot" }, this.figure);
    this.svg = svgElement("svg", { tabindex: "0", role: "img",
      "aria-label": `${chart.title} against epochs; the arrow keys go from epoch to epoch` }, plot);
    this.tooltip = element("div", { class: "tooltip", role: "status", hidden: "" }, plot);
    for (const type of ["pointermove", "pointerdown"]) {
      this.svg.addEventListener(type, (event) => this.point(event));
    }
    this.svg.addEventListener("pointerleave", () => this.show(null));
    this.svg.addEventListener("blur", () => this.show(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.figure);
  }

  draw() {
    const width = this.svg.clientWidth, height = Math.max(220, Math.min(330, Math.round(width * 0.6)));
    if (!width) return;
    this.width = width;
    this.height = height;
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.series = visibleSeries(this.chart);
    const recipes = this.chart.recipe ? page.runs.filter((_, index) => shown[index]) : [];
    const points = [...this.series.flatMap(({ points }) => points), ...recipes.flatMap((run) => run.recipe)];
    this.epochs = [...new Set(this.series.flatMap(({ points }) => points.map(([epoch]) => epoch)))];
    this.epochs.sort((first, second) => first - second);
    this.scaleTo(points);
    this.drawAxes();
    if (this.chart.recipe) this.drawRecipes();
    for (const series of this.series) this.drawSeries(series);
    if (!points.length) {
      svgElement("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, this.svg, "nothing to show");
    }
    this.guide = svgElement("line", { class: "guide", visibility: "hidden" }, this.svg);
    this.show(this.epochs.includes(this.epoch) ? this.epoch : null);
  }

  drawable(value) {
    const size = this.logarithmic ? number(value) : Math.abs(number(value));
    return size <= LARGEST && (!this.logarithmic || size >= 1 / LARGEST);
  }

  scaleTo(points) {
    const bottom = this.height - MARGIN.bottom, right = this.width - MARGIN.right;
    const values = points.map(([, value]) => value).filter((value) => this.drawable(value)).map(Number);
    const vertical = verticalScale(
      values, { logarithmic: this.logarithmic, fromZero: this.chart.from_zero }, bottom, MARGIN.top);
    // A value that the scale has no place for is marked at the edge.
    this.y = (value) => this.drawable(value) ? vertical.at(number(value))
      : number(value) < 1 ? bottom : MARGIN.top;
    this.yTicks = vertical.ticks;
    const ends = points.map(([epoch]) => epoch);
    const low = this.chart.recipe || !ends.length ? 0 : least(ends);
    const high = most([low + 1, ...ends]);
    this.x = (epoch) => MARGIN.left + (epoch - low) / (high - low) * (right - MARGIN.left);
    this.xTicks = linearTicks(low, high, Math.max(2, Math.floor((right - MARGIN.left) / 60)), true);
  }

  drawAxes() {
    const bottom = this.height - MARGIN.bottom, right = this.width - MARGIN.right;
    for (const tick of this.yTicks) {
      const y = this.y(tick);
      svgElement("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }, this.svg);
      svgElement("text", { x: MARGIN.left - 7, y: y + 4, "text-anchor": "end" }, this.svg,
        tickText(tick, this.chart));
    }
    svgElement("line", { class: "grid", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }, this.svg);
    for (const tick of this.xTicks) {
      svgElement("text", { x: this.x(tick), y: bottom + 17, "text-anchor": "middle" }, this.svg, tick);
    }
    svgElement("text", { x: right, y: this.height - 4, "text-anchor": "end" }, this.svg, "epoch");
  }

  drawRecipes() {
    page.runs.forEach((run, index) => {
      if (!shown[index]) return;
      const path = run.recipe.map(([epoch, rate]) => `${this.x(epoch)},${this.y(rate)}`).join("L");
      svgElement("path", { class: "curve recipe", "data-run": index, "data-kind": "recipe",
        stroke: colour(index), d: `M${path}` }, this.svg);
    });
  }

  drawSeries({ run, kind, single, points }) {
    const group = svgElement("g", { "data-run": run, "data-kind": kind, stroke: colour(run),
      fill: colour(run) }, this.svg);
    const parts = [[]];
    for (const [epoch, value] of points) {
      if (this.drawable(value)) parts.at(-1).push([this.x(epoch), this.y(value)]);
      else {
        parts.push([]);
        this.drawCross(group, this.x(epoch), this.y(value));
      }
    }
    for (const part of parts.filter((part) => part.length)) {
      if (!this.chart.recipe) {
        svgElement("path", { class: `curve ${single ? "" : kind}`, d: `M${part.map(String).join("L")}` }, group);
      }
      if (this.chart.recipe || part.length === 1 || points.length <= MOST_MARKERS) {
        const r = points.length <= MOST_MARKERS ? 2.5 : 1.5;
        for (const [x, y] of part) svgElement("circle", { cx: x, cy: y, r, stroke: "none" }, group);
      }
    }
  }

  drawCross(group, x, y) {
    svgElement("path", { class: "curve cross", d: `M${x - 4},${y - 4}l8,8m0,-8l-8,8` }, group);
  }

  // The values of an epoch

  point(event) {
    const x = event.clientX - this.svg.getBoundingClientRect().left;
    const distance = (epoch) => Math.abs(this.x(epoch) - x);
    this.show(this.epochs.reduce((best, epoch) => best === null || distance(epoch) < distance(best) ? epoch : best, null));
  }

  step(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.show(null);
    if (!move || !this.epochs.length) return;
    event.preventDefault();
    const place = this.epoch === null ? (move > 0 ? -1 : this.epochs.length) : this.epochs.indexOf(this.epoch);
    this.show(this.epochs[Math.max(0, Math.min(this.epochs.length - 1, place + move))]);
  }

  show(epoch) {
    this.epoch = epoch;
    this.tooltip.hidden = epoch === null;
    this.guide.setAttribute("visibility", epoch === null ? "hidden" : "visible");
    if (epoch === null) return;
    const x = this.x(epoch);
    for (const [key, value] of Object.entries({ x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom })) {
      this.guide.setAttribute(key, value);
    }
    this.fillTooltip(epoch);
    this.placeTooltip(x);
  }

  // Beside the guide, where there is more room; below the plot, where there is too little.
  placeTooltip(x) {
    const own = this.tooltip.offsetWidth, gap = 12;
    const left = x < this.width / 2 ? x + gap : x - gap - own;
    const fits = left >= 0 && left + own <= this.width;
    this.tooltip.style.left = `${fits ? left : Math.max(0, (this.width - own) / 2)}px`;
    this.tooltip.style.top = `${fits ? 8 : this.height - 12}px`;
  }

  fillTooltip(epoch) {
    this.tooltip.replaceChildren();
    const table = element("table", {}, this.tooltip);
    const both = ["training", "validation"].filter((kind) => this.series.some((each) => each.kind === kind));
    const head = element("tr", {}, element("thead", {}, table));
    element("th", { scope: "col" }, head, `epoch ${epoch}`);
    if (this.series.some((each) => !each.single)) {
      for (const kind of both) element("th", { scope: "col" }, head, kind);
    }
    const body = element("tbody", {}, table);
    for (const run of new Set(this.series.map((each) => each.run))) {
      const texts = both.map((kind) => {
        const series = this.series.find((each) => each.run === run && each.kind === kind);
        const point = series && series.points.find(([each]) => each === epoch);
        return point ? short(point[1], this.chart) : "";
      });
      if (!texts.some(Boolean)) continue;
      const row = element("tr", {}, body);
      const heading = element("th", { scope: "row" }, row);
      element("i", { class: "swatch", style: `--colour: ${colour(run)}` }, heading);
      element("span", {}, heading, page.runs[run].label);
      for (const text of texts) element("td", {}, row, text);
    }
  }
}

// The legend, which turns runs on and off

const charts = page.charts.map((chart) => new Chart(chart, document.getElementById("charts")));
const legend = document.getElementById("legend");

function addButton(isOn, turn, text) {
  const button = element("button", { type: "button" }, legend);
  button.isOn = isOn;
  button.addEventListener("click", () => { turn(); update(); });
  if (text) button.append(text);
  return button;
}

function update() {
  for (const button of legend.children) {
    if (button.isOn) button.setAttribute("aria-pressed", String(button.isOn()));
  }
  for (const chart of charts) chart.draw();
}

page.runs.forEach((run, index) => {
  const button = addButton(() => shown[index], () => { shown[index] = !shown[index]; });
  element("i", { class: "swatch", style: `--colour: ${colour(index)}` }, button);
  button.append(run.label);
});
if (page.runs.length > 2) {
  addButton(null, () => shown.fill(true), "all");
  addButton(null, () => shown.fill(false), "none");
}
for (const kind of Object.keys(kinds)) {
  const button = addButton(() => kinds[kind], () => { kinds[kind] = !kinds[kind]; });
  const sample = svgElement("svg", { viewBox: "0 0 28 8", "aria-hidden": "true" }, button);
  svgElement("path", { class: `curve ${kind}`, stroke: "currentColor", d: "M0,4H28" }, sample);
  button.append(kind);
}
for (const swatch of document.querySelectorAll(".swatch[data-run]")) {
  swatch.style.setProperty("--colour", colour(Number(swatch.dataset.run)));
}
update();
})();
