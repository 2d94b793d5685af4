// Arrow keys between the points of a chart, and dragging over a range. Clicks are plain links.
// The handlers are those of the document, since a chart is replaced while its run trains.
"use strict";

// The chart in which a drag began, where it began, and the drawn range once it is one.
let plot = null;
let start = 0;
let rectangle = null;
let dragged = false;

const findPlot = (event) => event.target.closest?.("[data-chart]");

function addRectangle() {
  const added = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  added.setAttribute("class", "drag");
  added.setAttribute("height", "100%");
  return plot.appendChild(added);
}

function measure(event) {
  const box = plot.getBoundingClientRect();
  return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
}

// Before the keys of the page, which move between steps.
document.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const points = [...(findPlot(event)?.querySelectorAll("a") ?? [])];
  const current = points.indexOf(document.activeElement);
  if (!by || current < 0) return;
  event.preventDefault();
  event.stopPropagation();
  points[current + by]?.focus({ preventScroll: true });
}, true);

document.addEventListener("dragstart", (event) => findPlot(event) && event.preventDefault());
document.addEventListener("pointerdown", (event) => {
  dragged = false;
  if (event.button || event.pointerType === "touch" || !findPlot(event)) return;
  plot = findPlot(event);
  start = measure(event);
});
document.addEventListener("pointermove", (event) => {
  if (!plot) return;
  const now = measure(event);
  if (!rectangle && Math.abs(now - start) * plot.clientWidth < 8) return;
  rectangle ??= addRectangle();
  rectangle.setAttribute("x", `${100 * Math.min(start, now)}%`);
  rectangle.setAttribute("width", `${100 * Math.abs(now - start)}%`);
});
document.addEventListener("pointerup", (event) => {
  if (!plot) return;
  const [low, high] = [start, measure(event)].sort((a, b) => a - b);
  const [first, last] = [Number(plot.dataset.first), Number(plot.dataset.last)];
  plot = null;
  if (!rectangle) return;
  dragged = true;
  rectangle.remove();
  rectangle = null;
  const address = new URL(location.href);
  address.hash = "";
  address.searchParams.set("from", Math.max(1, Math.floor(first + low * (last - first))));
  address.searchParams.set("to", Math.ceil(first + high * (last - first)));
  location.assign(address);
});
document.addEventListener("click", (event) => dragged && findPlot(event) && event.preventDefault(), true);

// The part that the reader uses is replaced later.
document.addEventListener("htmx:beforeSwap", (event) => {
  if (plot || event.detail.target.contains(document.activeElement)) event.preventDefault();
});
