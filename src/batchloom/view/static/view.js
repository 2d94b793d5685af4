// Keys, the theme and copying. Links and forms work without scripts.
"use strict";

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

document.getElementById("theme")?.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("batchloom-theme", theme);
});

const keys = document.getElementById("keys");
document.getElementById("help")?.addEventListener("click", () => keys.showModal());

async function fetchText(address) {
  const answer = await fetch(address);
  if (!answer.ok) throw new Error(`${address}: ${answer.status}`);
  return answer.text();
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-copy-text]");
  if (!button) return;
  await navigator.clipboard.writeText(button.dataset.copyText ?? (await fetchText(button.dataset.copy)));
  button.textContent = "Copied";
});

// A search goes on by itself until it finds a document.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-stop]");
  if (button) htmx.trigger(button.closest("tr"), "htmx:abort");
});

if (location.hash === "#search") document.getElementById("search")?.focus();

// Find the text of a search in a document, also across the elements of its tokens.
const query = new URLSearchParams(location.search);
if (query.get("find") && query.get("mode") !== "regex") window.find(query.get("find"));

// A part of a page that cannot be shown says why, in its own place.
function showFailure(part, message) {
  const place = part.querySelector("[data-failure], td, p") ?? part;
  place.hidden = false;
  place.textContent = message;
}
document.addEventListener("htmx:responseError", (event) => {
  const page = new DOMParser().parseFromString(event.detail.xhr.responseText, "text/html");
  showFailure(event.detail.elt, page.querySelector(".error")?.textContent ?? "This part cannot be shown.");
});
document.addEventListener("htmx:sendError", (event) => {
  showFailure(event.detail.elt, "batchloom view does not answer: it was stopped.");
});

function moveSelection(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  if (!rows.length) return;
  const current = rows.findIndex((row) => row.hasAttribute("data-selected"));
  const next = rows[Math.max(0, Math.min(rows.length - 1, current + by))];
  rows[current]?.removeAttribute("data-selected");
  next.setAttribute("data-selected", "");
  next.querySelector("a")?.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && event.target.id === "search") event.target.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const link = { ArrowLeft: "prev", ArrowRight: "next" }[event.key];
  if (link) document.querySelector(`a[rel=${link}]`)?.click();
  else if (event.key === "j") moveSelection(1);
  else if (event.key === "k") moveSelection(-1);
  else if (event.key === "?") keys.showModal();
  else if (event.key === "/") {
    event.preventDefault();
    const search = document.getElementById("search");
    if (search) search.focus();
    else location.href = `${document.querySelector('nav a[href^="/documents"]').href}#search`;
  }
});
