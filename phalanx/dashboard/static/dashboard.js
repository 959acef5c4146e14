// Draws figures that the server makes, asks again for what goes on, and keeps the choice of dark or light.
// Everything but figures and their refreshing works without it.
"use strict";
(() => {
  const root = document.documentElement;
  const stored = localStorage.getItem("phalanx-theme");
  if (stored) root.dataset.theme = stored;
  root.classList.add("scripted");

  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const tags = new WeakMap();   // element -> ETag of what it shows
  const figures = new Set();
  let failedSince = null;

  function offline(isOff) {
    const banner = document.querySelector("[data-offline]");
    if (!banner) return;
    if (!isOff) { failedSince = null; banner.hidden = true; return; }
    failedSince = failedSince || new Date();
    banner.textContent = `The dashboard has not answered since ${failedSince.toLocaleTimeString()}: what is shown is old.`;
    banner.hidden = false;
  }

  async function ask(element, address) {
    const headers = { "data-part": "1" };
    if (tags.has(element)) headers["If-None-Match"] = tags.get(element);
    let answer;
    try { answer = await fetch(address, { headers, cache: "no-store" }); } catch (error) { offline(true); return null; }
    offline(false);
    if (answer.status === 304) return null;
    if (answer.ok && answer.headers.get("etag")) tags.set(element, answer.headers.get("etag"));
    return answer;
  }

  function themed(layout) {
    const text = css("--text");
    layout.font = { ...layout.font, color: text };
    layout.hoverlabel = { ...layout.hoverlabel, bgcolor: css("--raised"), bordercolor: css("--line"), font: { color: text } };
    layout.modebar = { color: css("--soft"), activecolor: css("--text"), bgcolor: "rgba(0,0,0,0)" };
    return layout;
  }

  async function draw(element) {
    const answer = await ask(element, element.dataset.figure);
    if (!answer) return;
    if (!answer.ok) {
      element.classList.add("failed");
      element.textContent = await answer.text();
      return;
    }
    const figure = await answer.json();
    const isFirst = !figures.has(element);
    if (isFirst) { element.textContent = ""; figures.add(element); }
    element.classList.remove("failed");
    const said = figure.layout.meta && figure.layout.meta.description;
    if (said) element.setAttribute("aria-label", said);
    figure.layout.uirevision = element.dataset.figure;   // zoom and hidden curves stay while it is refreshed
    await Plotly.react(element, figure.data, themed(figure.layout), { responsive: true, displaylogo: false });
    element.style.minHeight = `${figure.layout.height}px`;
    if (isFirst) { leads(element); offerTable(element); }
    if (isFirst && "clickLinks" in element.dataset) {
      element.on("plotly_click", (event) => {
        const target = event.points[0] && event.points[0].customdata;
        if (typeof target === "string" && target.startsWith("/")) location.assign(target);
      });
    }
    element.dispatchEvent(new CustomEvent("figure-drawn", { bubbles: true }));
  }

  // The numbers of a figure as a table, for who does not see it; made only when it is opened.
  function offerTable(element) {
    const details = document.createElement("details");
    details.className = "as-table";
    details.innerHTML = "<summary>Numbers as a table</summary>";
    const around = document.createElement("div");   // one cell where figures stand beside each other
    element.replaceWith(around);
    around.append(element, details);
    details.addEventListener("toggle", () => {
      details.querySelector(".scroll")?.remove();
      if (details.open) details.append(tableOf(element));
    });
  }

  function tableOf(element) {
    const most = 500;
    const around = document.createElement("div");
    around.className = "scroll";
    around.tabIndex = 0;
    const table = around.appendChild(document.createElement("table"));
    const row = (cells, tag, within) => {
      const line = within.appendChild(document.createElement("tr"));
      cells.forEach((cell, place) => {
        const one = line.appendChild(document.createElement(place ? tag : "th"));
        one.textContent = typeof cell === "number" ? String(Number(cell.toPrecision(6))) : cell === null || cell === undefined ? "" : String(cell).replace(/<br>/g, ", ");
      });
    };
    const head = table.createTHead(), body = table.createTBody();
    const maps = element._fullData.filter((trace) => trace.type === "heatmap" && trace.z);
    if (maps.length) {
      const { x, y, z } = maps[0];
      const xs = Array.from(x || z[0], (value, place) => (x ? value : place)).slice(0, 64);
      row(["", ...xs], "th", head);
      Array.from(z).slice(0, most).forEach((line, place) => row([y ? y[place] : place, ...Array.from(line).slice(0, 64)], "td", body));
    } else {
      row(["", "x", "y", ""], "th", head);
      element._fullData.forEach((trace) => {
        const count = Math.min(trace.x ? trace.x.length : 0, most);
        for (let place = 0; place < count && body.rows.length < most; place++) {
          const text = Array.isArray(trace.hovertext) ? trace.hovertext[place] : Array.isArray(trace.text) ? trace.text[place] : "";
          row([trace.name, trace.x[place], trace.y[place], text], "td", body);
        }
      });
    }
    return around;
  }

  // What a click on a point leads to where the points do not say it themselves: data-href around the figure, in which
  // {x}, {y} and {customdata} are the point's. A stretch of the first axis that is looked at stands in the URL.
  function leads(element) {
    if (element.closest("[data-href]")) {
      element.on("plotly_click", (event) => {
        const around = element.closest("[data-href]");   // asked now: another state of the page may have taken it away
        if (!around) return;
        const point = event.points[0];
        const values = { x: point.x, y: point.y, customdata: point.customdata };
        const target = around.dataset.href.replace(/\{(x|y|customdata)\}/g, (_, name) => encodeURIComponent(values[name]));
        if (!target.includes("undefined")) location.assign(target);
      });
    }
    if (element.closest("[data-zoom]")) {
      element.on("plotly_relayout", (change) => {
        const address = new URL(location.href);
        const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
        if (from !== undefined) {
          address.searchParams.set("from", Number(from).toPrecision(7));
          address.searchParams.set("to", Number(to).toPrecision(7));
        } else if (change["xaxis.autorange"]) {
          address.searchParams.delete("from");
          address.searchParams.delete("to");
        } else return;
        history.replaceState(null, "", address);
      });
    }
  }

  // What had the focus has it again after its part of the page was replaced.
  function keepingFocus(within, change) {
    const had = within.contains(document.activeElement) ? document.activeElement : null;
    change();
    if (!had || had.isConnected) return;
    const same = [...within.querySelectorAll(had.tagName)].find((one) =>
      ["id", "name", "value", "href"].every((name) => one.getAttribute(name) === had.getAttribute(name)));
    if (same) same.focus({ preventScroll: true });
  }

  const atEnd = (element) => element.scrollHeight - element.scrollTop - element.clientHeight < 40;

  async function refill(element) {
    const active = document.activeElement;
    const types = element.contains(active) && active.matches("textarea, select, input:not([type=checkbox])");
    const selection = document.getSelection();
    if (types || (selection && !selection.isCollapsed && element.contains(selection.anchorNode))) return;
    const answer = await ask(element, element.dataset.fragment);
    if (!answer || !answer.ok) return;
    const text = await answer.text();
    const [top, isAtEnd] = [element.scrollTop, atEnd(element)];
    keepingFocus(element, () => { element.innerHTML = text; });
    if ("stick" in element.dataset) element.scrollTop = isAtEnd ? element.scrollHeight : top;
    start(element);
  }

  // Another state of the same page: figures stay and are drawn again from their new address.
  let asked = 0;
  async function show(address, isBack) {
    const number = ++asked;
    let answer;
    try { answer = await fetch(address, { headers: { accept: "text/html" } }); } catch (error) { offline(true); return; }
    const text = await answer.text();
    if (number !== asked) return;
    const page = new DOMParser().parseFromString(text, "text/html");
    const main = page.querySelector("main");
    if (!answer.ok || !main) { location.assign(address); return; }
    if (!isBack) history.pushState(null, "", address);
    document.title = page.title;
    const here = document.querySelector("main");
    main.querySelectorAll("[data-figure][id]").forEach((fresh) => {
      const old = document.getElementById(fresh.id);
      if (!old || !figures.has(old)) return;
      old.dataset.figure = fresh.dataset.figure;
      fresh.replaceWith(old.parentElement.querySelector(":scope > .as-table") ? old.parentElement : old);
    });
    keepingFocus(here, () => here.replaceChildren(...main.childNodes));
    start(here);
  }

  function addressOf(form) {
    const query = new URLSearchParams();
    for (const [name, value] of new FormData(form)) if (value !== "") query.append(name, value);
    const usual = form.dataset.usual ? new URLSearchParams(form.dataset.usual) : null;
    if (usual) for (const [name, value] of usual) if (query.getAll(name).length === 1 && query.get(name) === value) query.delete(name);
    const text = query.toString();
    return form.getAttribute("action") + (text ? `?${text}` : "");
  }

  function repeat(element, once) {
    const every = parseFloat(element.dataset.everyS || "0");
    if (!every || element.dataset.repeats) return;
    element.dataset.repeats = "1";
    const again = async () => {
      if (!element.isConnected) return;
      if (!document.hidden) await once(element).catch(() => {});
      setTimeout(again, every * 1000);
    };
    setTimeout(again, every * 1000);
  }

  function start(within) {
    within.querySelectorAll("[data-figure]").forEach((element) => {
      draw(element).catch((error) => { element.classList.add("failed"); element.textContent = `not drawn: ${error}`; });
      repeat(element, draw);
    });
    within.querySelectorAll("[data-stick]").forEach((element) => { element.scrollTop = element.scrollHeight; });
    within.querySelectorAll("[data-fragment]").forEach((element) => {
      if (element.hasAttribute("data-now")) refill(element);
      repeat(element, refill);
    });
  }

  function recolor() {
    figures.forEach((element) => {
      if (element.isConnected && element.layout) Plotly.relayout(element, themed({ ...element.layout }));
    });
  }

  document.addEventListener("change", (event) => {
    const form = event.target.form;
    if (form && "auto" in form.dataset) show(addressOf(form));
  });
  document.addEventListener("submit", (event) => {
    if ("auto" in event.target.dataset) { event.preventDefault(); show(addressOf(event.target)); }
  });
  window.addEventListener("popstate", () => show(location.href, true));
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-soft]");
    if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey && event.button === 0) {
      event.preventDefault();
      show(link.getAttribute("href"));
    }
    if (event.target.closest("[data-theme-toggle]")) {
      root.dataset.theme = dark() ? "light" : "dark";
      localStorage.setItem("phalanx-theme", root.dataset.theme);
      recolor();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  document.addEventListener("DOMContentLoaded", () => start(document));
})();
