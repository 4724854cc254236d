// The page of `gradsync watch`: shows the token once, then swaps in the parts that the server sends.
"use strict";

// A stranger's page is a door; the token is behind # in the address, which no server gets to see by itself.
async function enter(door) {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  history.replaceState(null, "", "/");
  if (!token) return;
  door.textContent = "One moment …";
  try {
    const answer = await fetch("/enter", { method: "POST", body: token, credentials: "same-origin" });
    if (answer.ok) location.reload();
    else door.textContent = "That is not the token of this server. Open the address that it printed.";
  } catch {
    door.textContent = "The server does not answer.";
  }
}

// The server has escaped all that comes from a run; the page's policy runs no script but this one.
function swap(id, html) {
  const part = document.getElementById(id);
  if (!part) return;
  const scrolled = [...part.querySelectorAll(".wide")].map((figure) => figure.scrollLeft);
  part.innerHTML = html;
  part.querySelectorAll(".wide").forEach((figure, index) => { figure.scrollLeft = scrolled[index] || 0; });
}

function say(kind, text) {
  const state = document.createElement("span");
  state.className = `state ${kind}`;
  state.textContent = text;
  document.getElementById("status").replaceChildren(state);
}

function follow() {
  let status = "";
  let lost = false;
  const events = new EventSource(`/events?since=${document.querySelector("[data-version]").dataset.version}`);
  events.onopen = () => {
    if (lost && status) swap("status", status);
    lost = false;
  };
  events.addEventListener("parts", (event) => {
    const parts = JSON.parse(event.data);
    status = parts.status || status;
    for (const [id, html] of Object.entries(parts)) swap(id, html);
  });
  events.onerror = () => {
    lost = true;
    say("lost", events.readyState === EventSource.CLOSED
      ? "the server ended; open the address it prints next time"
      : "connection lost, trying again");
  };
  addEventListener("pagehide", () => events.close());
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
}

const door = document.getElementById("door");
if (door) enter(door);
else {
  if (location.hash) history.replaceState(null, "", "/");
  follow();
}
