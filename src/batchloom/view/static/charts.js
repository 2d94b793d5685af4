// Arrow keys between the points of a chart, and dragging over a range. Clicks are plain links.
"use strict";

function addRectangle(plot) {
  const rectangle = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  rectangle.setAttribute("class", "drag");
  rectangle.setAttribute("height", "100%");
  return plot.appendChild(rectangle);
}

for (const plot of document.querySelectorAll("[data-chart]")) {
  const points = [...plot.querySelectorAll("a")];
  const [first, last] = [Number(plot.dataset.first), Number(plot.dataset.last)];
  let start = null;
  let rectangle = null;
  let dragged = false;

  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const current = points.indexOf(document.activeElement);
    if (!by || current < 0) return;
    event.preventDefault();
    event.stopPropagation();
    points[current + by]?.focus({ preventScroll: true });
  });

  const measure = (event) => {
    const box = plot.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };
  plot.addEventListener("dragstart", (event) => event.preventDefault());
  plot.addEventListener("pointerdown", (event) => {
    if (event.button || event.pointerType === "touch") return;
    start = measure(event);
    dragged = false;
  });
  addEventListener("pointermove", (event) => {
    if (start === null) return;
    const now = measure(event);
    if (!rectangle && Math.abs(now - start) * plot.clientWidth < 8) return;
    rectangle ??= addRectangle(plot);
    rectangle.setAttribute("x", `${100 * Math.min(start, now)}%`);
    rectangle.setAttribute("width", `${100 * Math.abs(now - start)}%`);
  });
  addEventListener("pointerup", (event) => {
    if (start === null) return;
    const [low, high] = [start, measure(event)].sort((a, b) => a - b);
    start = null;
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
  plot.addEventListener("click", (event) => dragged && event.preventDefault(), true);
}
