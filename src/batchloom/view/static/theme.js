// Runs before the first paint, so that a chosen theme does not flash.
"use strict";
const chosen = localStorage.getItem("batchloom-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
