// State lives in the address: only what differs from the base scenario is in it.
"use strict";

const byId = (id) => document.getElementById(id);
let fields = [];
let request = 0;
let timer = 0;

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// text with its http addresses as links
function linked(text) {
  const span = make("span");
  let last = 0;
  for (const match of text.matchAll(/https?:\/\/[^\s,;)]+/g)) {
    span.append(text.slice(last, match.index));
    span.append(make("a", {href: match[0], rel: "noreferrer", target: "_blank"}, match[0]));
    last = match.index + match[0].length;
  }
  span.append(text.slice(last));
  return span;
}

function control(field, value) {
  const id = `f-${field.name}`;
  const box = make("div", {class: "field", "data-name": field.name});
  const unit = field.unit ? make("span", {class: "unit"}, ` ${field.unit}`) : "";
  if (field.kind === "media") {
    box.classList.add("media");
    const chosen = value.split(",");
    for (const [name, title] of field.choices) {
      const check = make("input", {type: "checkbox", value: name, checked: chosen.includes(name)});
      box.append(make("label", {}, check, title));
    }
  } else if (field.kind === "check") {
    const check = make("input", {type: "checkbox", id, checked: value === "1"});
    box.append(make("label", {for: id}, check, ` ${field.label}`));
  } else if (field.kind === "choice") {
    const select = make("select", {id});
    for (const [name, title] of field.choices) {
      select.append(make("option", {value: name, selected: name === value}, title));
    }
    box.append(make("label", {for: id}, field.label), select);
  } else {
    const text = make("input", {type: "text", id, value, "aria-describedby": `${id}-error`,
      inputmode: field.kind === "number" ? "decimal" : "text"});
    text.value = value;
    box.append(make("label", {for: id}, field.label, unit));
    if (field.kind === "number") {
      const slide = make("input", {type: "range", min: field.low, max: field.high,
        step: field.step, "aria-label": `${field.label}, slider`});
      slide.value = value;
      slide.addEventListener("input", () => { text.value = slide.value; changed(); });
      text.addEventListener("input", () => { slide.value = text.value; });
      box.append(make("div", {class: "pair"}, slide, text));
    } else {
      box.append(text);
    }
  }
  box.append(make("p", {class: "error", id: `${id}-error`, role: "alert"}));
  if (field.source !== "the scenario") {
    box.append(make("details", {}, make("summary", {}, "source"),
      linked(field.source), make("br"), linked(field.note)));
  } else if (field.note) {
    box.append(make("span", {class: "unit"}, field.note));
  }
  return box;
}

function valueOf(field) {
  const box = document.querySelector(`[data-name="${CSS.escape(field.name)}"]`);
  if (field.kind === "media") {
    return [...box.querySelectorAll("input:checked")].map((item) => item.value).join(",");
  }
  if (field.kind === "check") return box.querySelector("input").checked ? "1" : "";
  return box.querySelector(field.kind === "choice" ? "select" : "input[type=text]").value.trim();
}

function state() {
  const query = new URLSearchParams();
  for (const field of fields) {
    const value = valueOf(field);
    const differs = value !== field.value;
    document.querySelector(`[data-name="${CSS.escape(field.name)}"]`)
      .classList.toggle("changed", differs);
    if (differs) query.set(field.name, value);
  }
  return query;
}

function build() {
  const given = new URLSearchParams(location.search);
  const form = byId("fields");
  form.replaceChildren();
  let group = null;
  for (const field of fields) {
    if (!group || group.dataset.group !== field.group) {
      group = make("fieldset", {"data-group": field.group}, make("legend", {}, field.group));
      if (field.name.includes(".")) {  // inputs by key fold away; the scenario's own stay open
        const fold = make("details", {class: "fold"}, make("summary", {}, field.group), group);
        form.append(fold);
      } else {
        form.append(group);
      }
    }
    if (given.has(field.name) && group.parentElement.tagName === "DETAILS") {
      group.parentElement.open = true;
    }
    group.append(control(field, given.has(field.name) ? given.get(field.name) : field.value));
  }
  for (const [id, preset] of [["x", "migration.price"], ["y", "tape.decline"]]) {
    const select = byId(id);
    select.replaceChildren();
    const names = fields.filter((field) => field.name.includes(".")).map((field) => field.name);
    const fallback = names.includes(preset) ? preset : names[id === "x" ? 0 : 1];
    const wanted = names.includes(given.get(id)) ? given.get(id) : fallback;
    for (const name of names) {
      select.append(make("option", {value: name, selected: name === wanted}, name));
    }
    select.dataset.base = fallback;
  }
}

function address() {
  const query = state();
  for (const id of ["x", "y"]) {
    const select = byId(id);
    if (select.value !== select.dataset.base) query.set(id, select.value);
  }
  const text = query.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
  for (const name of ["report.html", "ledger.csv", "yearly.csv", "scenario.toml"]) {
    byId(`export-${name.split(".")[0]}`).href = `/export/${name}?${state()}`;
  }
}

function table(data, links = false) {
  const head = make("tr", {}, ...data.header.map((cell) => make("th", {scope: "col"}, cell)));
  const rows = data.rows.map((row) => make("tr", {},
    ...row.map((cell) => make("td", {}, links ? linked(cell) : cell))));
  return make("div", {class: "wide", tabindex: "0"}, make("table", {},
    make("caption", {}, data.caption), make("thead", {}, head), make("tbody", {}, ...rows)));
}

function figure(data) {
  const bytes = new TextEncoder().encode(data.svg);
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  const image = make("img", {alt: data.caption, src: `data:image/svg+xml;base64,${btoa(text)}`});
  return make("figure", {id: `figure-${data.name}`}, image,
    make("figcaption", {}, data.caption));
}

function showErrors(errors) {
  for (const box of document.querySelectorAll(".field")) {
    const message = errors[box.dataset.name] || "";
    box.classList.toggle("bad", Boolean(message));
    box.querySelector(".error").textContent = message;
    const input = box.querySelector("input[type=text]");
    if (input) input.setAttribute("aria-invalid", message ? "true" : "false");
  }
  const known = fields.map((field) => field.name);
  byId("error").textContent = Object.entries(errors)
    .filter(([name]) => !known.includes(name)).map(([, message]) => message).join("; ");
}

function changed() {
  address();
  clearTimeout(timer);
  timer = setTimeout(refresh, 250);
}

async function answer(path) {
  const response = await fetch(path);
  return [response.ok, await response.json()];
}

async function refresh() {
  const mine = ++request;
  const query = state();
  byId("status").textContent = "computing";
  byId("results").classList.add("stale");
  try {
    const [ok, data] = await answer(`/api/compare?${query}`);
    if (mine !== request) return;
    showErrors(ok ? {} : data.errors);
    if (!ok) { byId("status").textContent = "a value cannot be used"; return; }
    byId("costs").replaceChildren(make("h2", {}, "What it costs"), table(data.table),
      ...data.notes.map((note) => make("p", {class: "unit"}, note)));
    byId("curves").replaceChildren(...data.figures.map(figure));
    byId("shares").replaceChildren(make("h2", {}, "What is called OPEX"),
      ...data.tables.map((item) => table(item)));
    byId("ledger").querySelector("div").replaceChildren(...data.ledgers.map((item) => table(item)));
    byId("assumptions").querySelector("div").replaceChildren(table(data.assumptions, true));
    query.set("x", byId("x").value);
    query.set("y", byId("y").value);
    const [mapped, map] = await answer(`/api/map?${query}`);
    if (mine !== request) return;
    byId("map-error").textContent = mapped ? "" : Object.values(map.errors).join("; ");
    byId("map-figure").replaceChildren(...(mapped ? [figure(map)] : []));
    byId("results").classList.remove("stale");
    byId("status").textContent = "up to date";
  } catch (error) {
    if (mine === request) byId("status").textContent = "no answer: is tierwise tco serve running?";
  }
}

async function start() {
  const [, data] = await answer("/api/fields");
  fields = data.fields;
  build();
  address();
  byId("fields").addEventListener("input", changed);
  byId("fields").addEventListener("submit", (event) => event.preventDefault());
  byId("x").addEventListener("change", changed);
  byId("y").addEventListener("change", changed);
  byId("reset").addEventListener("click", () => {
    history.replaceState(null, "", location.pathname);
    build();
    changed();
  });
  window.addEventListener("popstate", () => { build(); changed(); });
  await refresh();
}

start();
