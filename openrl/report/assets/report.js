"use strict";
// The report's page. Whatever models, data and names wrote reaches the page as text nodes only.
(function () {
  const $ = (id) => document.getElementById(id);
  const read = (id) => ($(id) ? JSON.parse($(id).textContent) : null);
  const DATA = read("overview");
  const RUNS = DATA.runs;
  const PAGE = 50; // rows of the table at a time
  const MOST_DOTS = 20000;

  // Returns an element; text becomes text nodes, so that no markup acts.
  function make(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((c) => c != null));
    return element;
  }
  const figure = (value) =>
    typeof value === "number" ? String(Number(value.toPrecision(4))) : value == null ? "" : String(value);
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (run) => style(`--run-${run % 8}`);

  // -- charts ----------------------------------------------------------------------------------

  const charts = new Set(); // functions that draw a chart anew

  // Returns the values smoothed from both sides, so that the curve does not lag behind them:
  // weights fall by the factor `keep` with each point of distance.
  function smooth(values, keep) {
    const count = values.length;
    const sums = values.slice(), weights = new Array(count).fill(1);
    for (const backwards of [false, true]) {
      let sum = 0, weight = 0;
      for (let k = 0; k < count; k++) {
        const n = backwards ? count - 1 - k : k;
        sums[n] += sum;
        weights[n] += weight;
        sum = keep * (sum + values[n]);
        weight = keep * (weight + 1);
      }
    }
    return sums.map((sum, n) => sum / weights[n]);
  }

  // Draws with uPlot. `build` returns {data, series, bands, log, click, zero}.
  function chart(place, build, height) {
    let plot = null, zoomed = null;
    function draw() {
      const { data, series, bands, log, click, zero } = build();
      if (plot) plot.destroy();
      if (!data[0].length) return place.replaceChildren(make("p", { class: "dim" }, "Nothing was measured."));
      const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, font: "12px sans-serif" };
      plot = new uPlot(
        {
          width: Math.max(260, place.clientWidth || 400), height: height || 200,
          scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) },
            y: zero ? { range: (u, low, high) => [0, high || 1] } : { distr: log ? 3 : 1 } },
          axes: [axis, { ...axis, size: 60, values: (u, ticks) => ticks.map(figure) }],
          cursor: { drag: { x: true, y: false }, points: { size: 6 } },
          series: [{ label: "step", value: (u, v) => figure(v) }, ...series], bands: bands || [],
        },
        data, place
      );
      if (zoomed) plot.setScale("x", zoomed);
      plot.over.addEventListener("dblclick", () => (zoomed = null));
      if (click) plot.over.addEventListener("click", () => plot.cursor.idx != null && click(plot.cursor.idx));
    }
    place.tabIndex = 0;
    place.addEventListener("keydown", (event) => {
      if (!plot) return;
      const { min, max } = plot.scales.x, width = max - min;
      const moves = { "+": [0.25, -0.25], "=": [0.25, -0.25], "-": [-0.5, 0.5], ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2] };
      if (event.key === "0") plot.setScale("x", { min: plot.data[0][0], max: plot.data[0].at(-1) });
      else if (moves[event.key]) {
        const [low, high] = moves[event.key];
        zoomed = { min: min + low * width, max: max + high * width };
        plot.setScale("x", zoomed);
      } else return;
      event.preventDefault();
    });
    whenSeen(place, () => { draw(); charts.add(draw); });
    return draw;
  }

  const waiting = new Map();
  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) seen(entry.target);
  }, { rootMargin: "300px" });
  function seen(element) {
    const act = waiting.get(element);
    waiting.delete(element);
    observer.unobserve(element);
    if (act) act();
  }
  function whenSeen(element, act) {
    waiting.set(element, act);
    observer.observe(element);
  }
  const drawAll = () => charts.forEach((draw) => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let resized = 0;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(drawAll, 200); });
  // paper is white: canvases are drawn before the browser changes its style
  addEventListener("beforeprint", () => { document.documentElement.dataset.print = "yes"; [...waiting.keys()].filter((e) => e.offsetParent).forEach(seen); drawAll(); });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.print; drawAll(); });

  // What `chart` draws of one metric: of each run the points and a smooth curve, perhaps a band.
  function metricData(name, spreads) {
    const keep = Number($("smoothing").value), raw = $("raw").checked, log = $("log").checked;
    const tables = [], series = [], bands = [];
    RUNS.forEach((run, n) => {
      const found = run.curves[name];
      if (!found) return;
      const label = RUNS.length > 1 ? run.name : name;
      const value = (u, v) => figure(v);
      const many = found[0].length > 20 && keep > 0; // a few evaluations are their own curve
      const values = log ? found[1].map((v) => (v > 0 ? v : null)) : found[1];
      const soft = many ? smooth(found[1], keep).map((v) => (log && v <= 0 ? null : v)) : null;
      const columns = [found[0]];
      const faint = many ? colour(n) + "55" : colour(n);
      if (raw || !many) {
        columns.push(values);
        series.push({ label, stroke: faint, width: 1, spanGaps: true, value, points: { show: found[0].length < 80, size: 4, fill: faint } });
      }
      if (many) {
        columns.push(soft);
        series.push({ label: `${label}, smooth`, stroke: colour(n), width: 2, spanGaps: true, value, points: { show: false } });
      }
      tables.push(columns);
      const spread = spreads && spreads[n];
      if (spread) {
        tables.push([spread.steps, spread.high, spread.low]);
        for (const end of ["90 % of groups below", "10 % of groups below"])
          series.push({ label: end, stroke: colour(n) + "44", width: 1, spanGaps: true, value, points: { show: false } });
        bands.push({ series: [series.length - 1, series.length], fill: colour(n) + "1c" });
      }
    });
    return { data: tables.length ? uPlot.join(tables) : [[]], series, bands, log };
  }

  function about(name) {
    const known = DATA.metrics[name] || {};
    const rows = [["what", known.formula], ["unit", known.unit], ["healthy", known.healthy], ["there", known.when], ["elsewhere", known.elsewhere]];
    const list = rows.filter(([, text]) => text).flatMap(([word, text]) => [make("dt", {}, word), make("dd", {}, text)]);
    const text = list.length ? make("dl", {}, list) : make("p", {}, "The table of metrics has no row for it: docs/metrics.md.");
    return make("details", { class: "about" }, make("summary", {}, name), text);
  }
  function metricChart(name, spreads, height) {
    const plot = make("div", { class: "plot", role: "img", "aria-label": `${name} over the steps` });
    const draw = chart(plot, () => metricData(name, spreads), height);
    return { box: make("div", { class: "chart", "data-metric": name }, about(name), plot), draw };
  }

  // -- first screen ----------------------------------------------------------------------------

  const heading = (run) => (RUNS.length > 1 ? make("h3", {}, run.name) : null);
  const measured = (name) => RUNS.some((run) => run.curves[name]);
  const spreads = {}; // metric -> spread over groups of each run, once the tables are read

  function overview() {
    $("state").append(RUNS.map((run) => `${run.name} ${run.state}`).join("; "), ` (as of ${DATA.made})`);
    for (const run of RUNS) for (const note of run.notes)
      $("notes").append(make("p", { class: "box" }, RUNS.length > 1 ? `${run.name}: ${note}` : note));
    const words = RUNS.map((run) => [heading(run), run.learning.length
      ? run.learning.map((text) => make("p", { class: /wrong/.test(text) ? "bad" : "" }, text))
      : make("p", { class: "dim" }, "Too few steps to say.")]);
    $("learning").append(...words.flat(2).filter(Boolean));
    for (const name of ["rollout/reward", "rollout/pass_rate", "eval/pass_rate", "eval/reward", "loss", "eval/loss"])
      if (measured(name)) {
        spreads[name] = [];
        const { box, draw } = metricChart(name, spreads[name], 170);
        spreads[name].draw = draw;
        $("learning").append(box);
      }
    RUNS.forEach(health);
    RUNS.forEach(time);
    differences();
  }

  function health(run) {
    const lines = run.alarms.map((alarm) => make("p", {}, make("strong", { class: "bad" }, `${alarm.name} at step ${alarm.step}: `),
      alarm.found, ". ", make("span", { class: "dim" }, `Try: ${alarm.remedy}`)));
    const seen = run.highlights;
    if (seen && seen.new_share > 0.5)
      lines.unshift(make("p", {}, make("strong", { class: "bad" }, "the answers changed their kind: "),
        `${percent(seen.new_share)} of the answers with the highest reward since step ${seen.since} are unlike any answer before it. `
        + "That is what exploiting a hole in the reward looks like: ", make("a", { href: "#look" }, "read some"), "."));
    if (!lines.length) lines.push(make("p", { class: "good" }, "No alarm was raised."));
    $("health").append(...[heading(run), ...lines].filter(Boolean));
  }

  function time(run, n) {
    const total = run.curves["time/step"];
    const items = run.stages.map(([stage, share]) => `${stage} ${percent(share)}`).join(", ");
    $("time").append(...[heading(run), make("p", {}, items ? `Shares of the time of all steps: ${items}.` : "No step has ended.")].filter(Boolean));
    if (!total) return;
    const plot = make("div", { class: "plot", role: "img", "aria-label": `seconds of each step by stage: ${items}` });
    $("time").append(plot);
    chart(plot, () => stacked(run), 190);
  }

  // Areas on top of each other: the highest sum is drawn first, each lower one over it.
  function stacked(run) {
    const steps = run.curves["time/step"][0], place = new Map(steps.map((step, n) => [step, n]));
    const names = run.stages.map(([stage]) => stage);
    const whole = run.curves["time/step"][1];
    const own = names.map((name) => {
      const values = new Array(steps.length).fill(0), found = run.curves[`time/${name}`];
      if (found) found[0].forEach((step, n) => place.has(step) && (values[place.get(step)] = found[1][n]));
      return values;
    });
    const other = names.indexOf("other");
    if (other >= 0) own[other] = whole.map((seconds, n) => Math.max(0, seconds - own.reduce((sum, of) => sum + of[n], 0)));
    const sums = [];
    own.forEach((values, k) => sums.push(values.map((value, n) => value + (k ? sums[k - 1][n] : 0))));
    const order = names.map((_, k) => k).reverse();
    const series = order.map((k) => ({ label: `${names[k]} s`, stroke: colour(k), fill: colour(k), width: 1,
      points: { show: false }, value: (u, v, s, n) => figure(n == null ? null : own[k][n]) }));
    return { data: [steps, ...order.map((k) => sums[k])], series, zero: true };
  }

  function differences() {
    if (RUNS.length < 2) {
      $("differences").append(make("p", { class: "dim" }, "One run is shown. Two side by side: python -m openrl.cli.report RUN OTHER"));
      return;
    }
    const head = make("tr", {}, make("th", {}, "flag"), RUNS.map((run) => make("th", {}, run.name)));
    const rows = DATA.differences.map(([flag, values]) => make("tr", {}, make("td", {}, `--${flag}`), values.map((v) => make("td", {}, v))));
    $("differences").append(make("div", { class: "wide" }, make("table", {}, make("thead", {}, head), make("tbody", {}, rows))));
    if (!rows.length) $("differences").append(make("p", {}, "All flags are equal."));
  }

  // -- curves ----------------------------------------------------------------------------------

  function curves() {
    const themes = new Map();
    for (const [name, known] of Object.entries(DATA.metrics)) {
      if (!themes.has(known.theme)) themes.set(known.theme, []);
      themes.get(known.theme).push(name);
    }
    for (const [theme, names] of themes) {
      const box = make("div", { class: "charts" });
      const details = make("details", { class: "theme" }, make("summary", {}, `${theme} (${names.length})`), box);
      const fill = () => { if (!box.childElementCount) box.append(...names.map((name) => metricChart(name).box)); };
      details.addEventListener("toggle", () => details.open && fill());
      details.names = names;
      details.fill = fill;
      $("themes").append(details);
    }
    const first = $("themes").firstElementChild;
    if (first) first.open = true;
    for (const id of ["smoothing", "raw", "log"]) $(id).addEventListener("input", drawAll);
    $("find-curve").addEventListener("input", () => {
      const wanted = $("find-curve").value.toLowerCase();
      for (const details of $("themes").children) {
        const hits = details.names.filter((name) => `${name} ${DATA.metrics[name].elsewhere || ""}`.toLowerCase().includes(wanted));
        details.hidden = !hits.length;
        if (wanted && hits.length) { details.fill(); details.open = true; }
        for (const box of details.querySelectorAll(".chart")) box.hidden = !hits.includes(box.dataset.metric);
      }
    });
    $("curve-controls").addEventListener("submit", (event) => event.preventDefault());
  }

  // -- tables of trajectories ------------------------------------------------------------------

  const tables = [];
  // Reads the columns of a run: table.get(name, row).
  function table(run) {
    if (tables[run] === undefined) {
      const columns = read(`table-${run}`);
      tables[run] = columns && {
        columns, count: columns.step.length,
        get: (name, row) => { const c = columns[name]; return Array.isArray(c) ? c[row] : "all" in c ? c.all : c.values[c.places[row]]; },
      };
    }
    return tables[run];
  }
  // Returns the rows of each group of a run, by a key.
  function groupsOf(t) {
    if (!t.groups) {
      t.groups = new Map();
      for (let row = 0; row < t.count; row++) {
        const key = groupKey(t, row);
        if (!t.groups.has(key)) t.groups.set(key, []);
        t.groups.get(key).push(row);
      }
    }
    return t.groups;
  }
  const groupKey = (t, row) => `${t.get("step", row)}/${t.get("tag", row) === "evaluation" ? "e" : "t"}/${t.get("group", row)}`;

  // Returns for each step what a tenth of its groups is below, and above.
  function spread(t, column, evaluated) {
    const steps = new Map();
    for (const rows of groupsOf(t).values()) {
      if ((t.get("tag", rows[0]) === "evaluation") !== evaluated) continue;
      const values = rows.filter((r) => t.get("role", r) === "answer").map((r) => t.get(column, r)).filter((v) => v != null);
      if (!values.length) continue;
      const step = t.get("step", rows[0]);
      if (!steps.has(step)) steps.set(step, []);
      steps.get(step).push(mean(values));
    }
    const order = [...steps.keys()].sort((a, b) => a - b);
    const at = (share) => order.map((step) => { const s = steps.get(step).sort((a, b) => a - b); return s[Math.round(share * (s.length - 1))]; });
    return order.length ? { steps: order, low: at(0.1), high: at(0.9) } : null;
  }
  function addSpreads() {
    const columns = { "rollout/reward": ["reward", false], "rollout/pass_rate": ["passed", false],
      "eval/reward": ["reward", true], "eval/pass_rate": ["passed", true] };
    for (const [name, [column, evaluated]] of Object.entries(columns)) {
      if (!spreads[name]) continue;
      RUNS.forEach((_, n) => { if (table(n)) spreads[name][n] = spread(table(n), column, evaluated); });
      if (charts.has(spreads[name].draw)) spreads[name].draw();
    }
  }

  const FILTERS = [
    ["step_min", "from step", "number"], ["step_max", "to", "number"], ["tag", "tag", "select"], ["source", "source", "select"],
    ["agent", "agent", "select"], ["end", "ended by", "select"], ["reward_min", "reward from", "number"], ["reward_max", "to", "number"],
    ["passed_min", "verdict from", "number"], ["tokens_min", "tokens from", "number"], ["tokens_max", "to", "number"],
    ["age_min", "age from", "number"], ["flat", "flat group", "yes"], ["failed", "failed", "yes"], ["prompt_id", "prompt", "text"],
    ["parts", "part, e.g. format<1", "text"], ["text", "text", "search"],
  ];
  const COLUMNS = ["step", "number", "tag", "prompt_id", "reward", "passed", "advantage", "tokens", "age", "gap_max", "entropy", "end", "text"];
  const LEFT = new Set(["tag", "prompt_id", "end", "text"]);
  let shown = { run: 0, sort: "step", down: false, page: 0, rows: [] };

  function filters() {
    const form = $("filters"), t = table(shown.run);
    form.replaceChildren();
    if (RUNS.length > 1)
      form.append(make("label", {}, "run ", make("select", { id: "filter-run", onchange: (e) => { shown.run = Number(e.target.value); shown.page = 0; filters(); } },
        RUNS.map((run, n) => make("option", { value: n, selected: n === shown.run }, run.name)))));
    if (!t) {
      $("found").textContent = "This run keeps no trajectories: see the note at the top of the page.";
      $("table").tHead.replaceChildren();
      $("table").tBodies[0].replaceChildren();
      $("pages").replaceChildren();
      return;
    }
    for (const [name, label, kind] of FILTERS) {
      const id = `filter-${name}`;
      let input;
      if (kind === "select" || kind === "yes") {
        const c = t.columns[name], some = kind === "yes" ? ["yes", "no"] : c.values.filter((v) => v != null);
        if (kind === "select" && some.length < 2) continue;
        input = make("select", { id }, make("option", { value: "" }, "any"), some.map((v) => make("option", { value: v }, v)));
      } else input = make("input", { id, type: kind, step: kind === "number" ? "any" : null, size: kind === "text" ? 12 : null });
      form.append(make("label", {}, `${label} `, input));
    }
    form.append(make("button", { type: "reset" }, "Clear"));
    find();
  }

  // Returns a test of a row for each filter that is set.
  function tests(t) {
    const given = (name) => { const input = $(`filter-${name}`); return input ? input.value.trim() : ""; };
    const found = [];
    for (const column of ["step", "reward", "passed", "tokens", "age"])
      for (const [end, holds] of [["min", (v, b) => v >= b], ["max", (v, b) => v <= b]]) {
        const bound = given(`${column}_${end}`);
        if (bound !== "") found.push((row) => { const v = t.get(column, row); return v != null && holds(v, Number(bound)); });
      }
    for (const column of ["tag", "source", "agent", "end"])
      if (given(column)) { const wanted = given(column); found.push((row) => t.get(column, row) === wanted); }
    if (given("prompt_id")) { const wanted = given("prompt_id"); found.push((row) => t.get("prompt_id", row) === wanted); }
    if (given("flat")) { const wanted = given("flat") === "yes"; found.push((row) => !!t.get("flat", row) === wanted); }
    if (given("failed")) { const wanted = given("failed") === "yes"; found.push((row) => (t.get("failure", row) != null) === wanted); }
    const part = /^(.+?)\s*([<>=])\s*(-?[\d.]+)$/.exec(given("parts"));
    if (part) found.push((row) => {
      const v = (t.get("parts", row) || {})[part[1]], bound = Number(part[3]);
      return v != null && (part[2] === "<" ? v < bound : part[2] === ">" ? v > bound : v === bound);
    });
    if (given("text")) {
      const wanted = given("text").toLowerCase();
      const prompts = t.columns.prompt.values.map((text) => text.toLowerCase().includes(wanted));
      found.push((row) => prompts[t.columns.prompt.places[row]] || t.columns.text[row].toLowerCase().includes(wanted));
    }
    return found;
  }

  function find() {
    const t = table(shown.run);
    if (!t) return;
    let rows = Array.from({ length: t.count }, (_, row) => row);
    for (const test of tests(t)) rows = rows.filter(test);
    const known = rows.filter((row) => t.get(shown.sort, row) != null), down = shown.down ? -1 : 1;
    const missing = rows.filter((row) => t.get(shown.sort, row) == null);
    if (shown.sort !== "step" || shown.down)
      known.sort((a, b) => { const x = t.get(shown.sort, a), y = t.get(shown.sort, b); return down * (x < y ? -1 : x > y ? 1 : 0) || a - b; });
    shown.rows = [...known, ...missing];
    shown.page = Math.min(shown.page, Math.max(0, Math.ceil(rows.length / PAGE) - 1));
    rowsShown(t);
  }

  function rowsShown(t) {
    const { rows, page, sort, down, run } = shown;
    $("found").textContent = `${rows.length} of ${t.count} trajectories`;
    $("table").tHead.replaceChildren(make("tr", {}, COLUMNS.map((name) => make("th", { "aria-sort": name === sort ? (down ? "descending" : "ascending") : null },
      make("button", { type: "button", "data-sort": name, onclick: () => { shown.down = sort === name && !down; shown.sort = name; shown.page = 0; find(); $("table").querySelector(`[data-sort=${name}]`).focus(); } },
        name === sort ? `${name} ${down ? "\u25bc" : "\u25b2"}` : name)))));
    const cells = (row) => COLUMNS.map((name) => {
      const value = name === "text" ? t.get("failure", row) || t.get("text", row).slice(0, 300) : figure(t.get(name, row));
      const open = make("button", { class: "link", type: "button", onclick: () => go(run, t.get("step", row), t.get("number", row)) }, value);
      return make("td", { class: LEFT.has(name) ? name : "number" }, name === "number" ? open : value);
    });
    $("table").tBodies[0].replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map((row) => make("tr", {}, cells(row))));
    const last = Math.ceil(rows.length / PAGE) - 1;
    const turn = (by, word) => make("button", { type: "button", disabled: page + by < 0 || page + by > last, onclick: () => { shown.page += by; rowsShown(t); } }, word);
    $("pages").replaceChildren(turn(-1, "Previous"), `page ${page + 1} of ${Math.max(1, last + 1)}`, turn(1, "Next"));
  }

  function rollouts() {
    let timer = 0;
    $("filters").addEventListener("input", (e) => { if (e.target.id === "filter-run") return; clearTimeout(timer); timer = setTimeout(() => { shown.page = 0; find(); }, 150); });
    $("filters").addEventListener("reset", () => setTimeout(find));
    $("filters").addEventListener("submit", (e) => { e.preventDefault(); find(); });
    filters();
    $("over-time").addEventListener("toggle", overTime);
  }

  // One row per evaluation prompt, one column per evaluation.
  function overTime() {
    const t = table(shown.run), place = $("over-time");
    if (!place.open) return;
    while (place.childElementCount > 1) place.lastElementChild.remove();
    const cells = new Map(), steps = new Set();
    for (let row = 0; t && row < t.count; row++) {
      if (t.get("tag", row) !== "evaluation" || t.get("role", row) !== "answer") continue;
      const id = t.get("prompt_id", row), step = t.get("step", row);
      if (!cells.has(id)) cells.set(id, new Map());
      if (!cells.get(id).has(step)) cells.get(id).set(step, row);
      steps.add(step);
    }
    if (!cells.size) return place.append(make("p", { class: "dim" }, "No evaluation is kept: --eval_dataset makes evaluations."));
    const order = [...steps].sort((a, b) => a - b), some = [...cells].slice(0, 200);
    if (some.length < cells.size) place.append(make("p", { class: "dim" }, `The first ${some.length} of ${cells.size} prompts.`));
    const cell = (rows, step) => {
      const row = rows.get(step);
      if (row === undefined) return make("td", {});
      const value = t.get("passed", row) ?? t.get("reward", row);
      const button = make("button", { class: "link", title: t.get("text", row).slice(0, 300), onclick: () => go(shown.run, step, t.get("number", row)) }, figure(value) || "none");
      const of = make("td", { class: "number" }, button);
      if (value != null) of.style.background = `rgba(${style("--positive")}, ${0.5 * Math.max(0, Math.min(1, value))})`;
      return of;
    };
    const lines = some.map(([id, rows]) => make("tr", {}, make("td", {}, id), order.map((step) => cell(rows, step))));
    place.append(make("div", { class: "wide" }, make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, "prompt"), order.map((s) => make("th", {}, `step ${s}`)))), make("tbody", {}, lines))));
  }

  // -- one trajectory --------------------------------------------------------------------------

  const COLOURS = [["advantage", "advantage: orange above 0, blue below"], ["gap", "gap: abs(trainer's log-prob - engine's)"],
    ["entropy", "entropy of the policy"], ["age", "age in syncs"], ["mask", "what the loss counted"]];
  const blocks = new Map();
  let by = "advantage";
  const go = (run, step, number) => { location.hash = `t=${run}/${step}/${number}`; };
  const expand = (list) => !list ? null : Array.isArray(list) ? list
    : Array.from({ length: list.runs.length / 2 }, (_, n) => new Array(list.runs[2 * n + 1]).fill(list.runs[2 * n])).flat();
  function block(id) {
    if (!blocks.has(id)) blocks.set(id, read(id));
    return blocks.get(id);
  }

  async function fromAddress() {
    const match = /^#t=(\d+)\/(\d+)\/(\d+)$/.exec(location.hash);
    if (!match) return;
    const [run, step, number] = match.slice(1).map(Number);
    const t = table(run);
    if (!t) return;
    const found = (block(`full-${run}-${step}`) || {})[number];
    let record = found && { ...found, pieces: block(`pieces-${run}`), image_data: block(`images-${run}`) };
    if (!record && DATA.served) {
      const reply = await fetch(`trajectory?run=${run}&step=${step}&number=${number}`);
      record = reply.ok ? await reply.json() : null;
    }
    trajectory(run, step, number, record);
  }

  function trajectory(run, step, number, record) {
    const t = table(run), section = $("trajectory"), body = section.lastElementChild;
    let row = 0;
    while (row < t.count && !(t.get("step", row) === step && t.get("number", row) === number)) row++;
    section.hidden = false;
    section.firstElementChild.textContent = `Trajectory ${step}/${number}${RUNS.length > 1 ? ` of ${RUNS[run].name}` : ""}`;
    body.replaceChildren();
    const has = row < t.count;
    if (has) {
      const rows = groupsOf(t).get(groupKey(t, row));
      body.append(make("dl", {}, facts(t, row, record)), siblings(run, t, row, rows));
      body.append(make("div", { id: "why" }, make("h3", {}, "Why this advantage"), why(t, row, rows, record, run)));
    }
    if (record) body.append(...transcript(record), ...tokens(record));
    else if (has) body.append(make("p", { class: "tokens" }, t.get("text", row)),
      make("p", { class: "dim" }, `Its tokens are not in this file, which holds a part of the trajectories in full: python -m openrl.cli.trace ${RUNS[run].path} ${step}/${number} prints them, --serve shows them here.`));
    else body.append(make("p", {}, "The trace has no such trajectory."));
    section.focus();
    section.scrollIntoView({ block: "start" });
  }

  function facts(t, row, record) {
    const get = (name) => t.get(name, row), r = record || {}, score = r.score || {};
    const parts = Object.entries(get("parts") || {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
    const listed = (value) => (value && Object.keys(value).length ? JSON.stringify(value) : null);
    const tools = (r.tool_uses || []).map((use) => `${use.name} in turn ${use.turn}, ${figure(use.seconds)} s${use.failed ? ", failed" : ""}`).join("\n");
    const lines = [
      ["tag", `${get("tag")}, ${get("role")} ${get("member")} of group ${get("group")}`],
      ["prompt row", `${get("prompt_id")}, source ${get("source")}${get("agent") ? `, agent ${get("agent")}` : ""}`],
      ["label", r.label == null ? null : typeof r.label === "string" ? r.label : JSON.stringify(r.label)], ["row", listed(r.meta)],
      ["played by", [get("engine") != null ? `engine ${get("engine")}` : null, `weights ${[...new Set(get("policy_versions") || [])].join(" to ") || "unknown"}`,
        r.sampling_seed != null ? `seed ${r.sampling_seed}` : null, get("seconds") != null ? `${figure(get("seconds"))} s` : null].filter(Boolean).join(", ")],
      ["ended", `${get("end")} after ${get("turns")} turn(s), ${get("tokens")} sampled tokens${get("replays") ? `, played again ${get("replays")} time(s)` : ""}`],
      ["tools", tools], ["environment", listed(r.metrics)], ["failure", get("failure")],
      ["reward", `${figure(get("reward")) || "none"}${get("passed") != null ? `, verdict ${figure(get("passed"))}` : ""}${parts ? `; parts: ${parts}` : ""}${score.attempts > 1 ? `, ${score.attempts} calls` : ""}`],
      ["trained in", get("optimizer_step") != null ? `optimizer step ${get("optimizer_step")}, ${get("trained_tokens")} tokens` : "no optimizer step"],
      ["measured", ["loss", "weight", "clipped", "entropy", "age", "gap_mean", "gap_max"].filter((n) => get(n) != null).map((n) => `${n} ${figure(get(n))}`).join(", ")],
    ];
    return lines.filter(([, text]) => text).flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]);
  }

  function siblings(run, t, row, rows) {
    const label = (r) => `${figure(t.get("reward", r)) || "none"}${t.get("role", r) === "answer" ? "" : ` (${t.get("role", r)})`}`;
    const buttons = rows.map((r) => make("button", { type: "button", title: t.get("text", r).slice(0, 300), "aria-current": r === row ? "true" : null,
      onclick: () => go(run, t.get("step", r), t.get("number", r)) }, label(r)));
    return make("div", {}, make("h3", {}, "Rewards of its group"), make("div", { class: "strip" }, buttons));
  }

  // How the advantage came about, from the reward on, in the words of the terminal.
  function why(t, row, rows, record, run) {
    const reward = t.get("reward", row), advantage = t.get("advantage", row), { shaped, estimate } = record || {};
    if (advantage == null) return make("p", {}, t.get("tag", row) === "train" ? "The step has not trained on it." : `It was not trained on: ${t.get("tag", row)}.`);
    const others = rows.filter((r) => t.get("role", r) === "answer").map((r) => t.get("reward", r)).filter((v) => v != null);
    const middle = others.length ? mean(others) : 0, squares = others.reduce((sum, v) => sum + (v - middle) ** 2, 0);
    const spread = new Set(others).size > 1 ? Math.sqrt(squares / (others.length - 1)) : 0; // equal rewards may differ from their mean by a rounding
    const lines = [["reward", reward, "what the reward gave"]];
    if (shaped != null && shaped !== reward) lines.push(["shaped", shaped, "clipping, scaling and penalties of length"]);
    const named = RUNS[run].estimator ? `--advantage_estimator ${RUNS[run].estimator}; ` : "";
    const group = `${named}its group: ${others.length} rewards, mean ${figure(middle)}, standard deviation ${figure(spread)}`
      + (t.get("flat", row) ? "; all are equal, so there is nothing to learn" : "");
    const rest = "rewards of tokens such as KL, whitening, clipping";
    if (estimate != null) lines.push(["compared with its siblings", estimate, group], ["+ the rest", advantage - estimate, rest]);
    lines.push(["= advantage", advantage, estimate != null ? "mean over its trained tokens" : `${group}; ${rest}`]);
    const most = Math.max(...lines.map(([, value]) => Math.abs(value || 0)));
    const shown = (value) => figure(Math.abs(value) < 1e-5 * most ? 0 : value) || "none"; // roundings of fp32 are no part
    return make("table", {}, make("tbody", {}, lines.map(([name, value, words]) => make("tr", {}, make("td", {}, name), make("td", { class: "number" }, shown(value)), make("td", {}, words)))));
  }

  function picture(record, name) {
    const data = record.image_data[name], short = `image ${name.slice(0, 12)}`;
    return data ? make("img", { src: data, alt: short }) : make("p", { class: "dim" }, `The ${short} is in the trace, not in this file.`);
  }

  // Who said what, turn by turn, beside what the environment drew.
  function transcript(record) {
    const turns = record.rendered || [];
    if (!turns.length) return [];
    const said = (who, text, images, mine) => make("div", { class: mine ? "mine" : null }, make("h4", {}, who), images.map((name) => picture(record, name)), make("pre", {}, text));
    const shown = turns.map((turn) => make("article", { class: "turn" }, turn.frame ? picture(record, turn.frame) : null, make("div", {},
      turn.messages.map((message) => said(message.role, message.text, message.images)),
      turn.action == null ? null : said(`policy, reward ${figure(turn.reward)}`, turn.action, [], true))));
    return [make("h3", {}, "Transcript"), make("div", { id: "transcript" }, shown)];
  }

  function tokens(record) {
    const readout = make("p", { id: "token", role: "status", class: "dim" }, "Click a token, or Tab to the text and press the arrow keys, for its figures.");
    const choice = make("select", { id: "colour-by" }, COLOURS.map(([name, words]) => make("option", { value: name, selected: name === by }, words)));
    const boxes = record.segments.map((segment, n) => oneSegment(record, segment, n, readout));
    choice.addEventListener("input", () => { by = choice.value; boxes.forEach((box) => box.paint()); });
    boxes.forEach((box) => box.paint());
    return [make("h3", {}, "Tokens"), make("p", { class: "controls" }, make("label", {}, "Colour by ", choice)), ...boxes.map((box) => box.element), readout];
  }

  function oneSegment(record, segment, n, readout) {
    const lists = {};
    for (const name of ["advantage", "gap", "entropy", "age", "mask", "logprob", "sampled"]) lists[name] = expand(segment[name]);
    const spans = segment.ids.map((id, k) => make("span", { class: lists.sampled[k] ? "sampled" : "given" }, record.pieces[id]));
    const text = make("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": `tokens of segment ${n}` }, spans);
    const scale = make("p", { class: "dim" });
    let at = -1;
    const tell = (k) => {
      if (k < 0 || k >= spans.length) return;
      if (at >= 0) spans[at].classList.remove("on");
      at = k;
      spans[k].classList.add("on");
      const values = ["advantage", "gap", "entropy", "age", "logprob"].filter((name) => lists[name] && lists[name][k] != null && (name !== "logprob" || lists.sampled[k]))
        .map((name) => `${name === "logprob" ? "engine's log-prob" : name} ${figure(lists[name][k])}`);
      readout.textContent = `token ${k} ${JSON.stringify(record.pieces[segment.ids[k]])}: ${values.join(", ") || (lists.sampled[k] ? "sampled" : "not sampled")}`;
    };
    text.addEventListener("click", (event) => tell(spans.indexOf(event.target)));
    text.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (by) { event.preventDefault(); tell(at < 0 ? Math.max(0, lists.sampled.findIndex(Boolean)) : at + by); }
    });
    function paint() {
      const values = lists[by];
      const most = values ? values.reduce((m, v) => Math.max(m, Math.abs(v || 0)), 0) : 0;
      scale.textContent = values && most ? `Full colour is ${figure(most)}.` : `${by}: ${values ? "0 everywhere" : "not measured"}.`;
      spans.forEach((span, k) => {
        const v = values ? values[k] : null;
        const tone = by !== "advantage" ? "--amount" : v < 0 ? "--negative" : "--positive";
        span.style.background = v ? `rgba(${style(tone)}, ${(0.1 + 0.6 * Math.abs(v) / most).toFixed(3)})` : "";
      });
    }
    const images = segment.images.map((name) => picture(record, name));
    return { paint, element: make("div", {}, record.segments.length > 1 ? make("h3", {}, `Segment ${n}`) : null, images, scale, text) };
  }

  // -- look here first, groups -----------------------------------------------------------------

  function look() {
    RUNS.forEach((run, n) => {
      const t = table(n), seen = run.highlights;
      if (heading(run)) $("look").append(heading(run));
      if (!t || !seen) return $("look").append(make("p", { class: "dim" }, "There are no trajectories: see the note at the top of the page."));
      const item = (row) => make("li", {}, make("button", { class: "link", type: "button", onclick: () => go(n, t.get("step", row), t.get("number", row)) },
        `${t.get("step", row)}/${t.get("number", row)}`), ` reward ${figure(t.get("reward", row)) || "none"}, ${t.get("tokens", row)} tokens`
        + `${t.get("gap_max", row) != null ? `, gap ${figure(t.get("gap_max", row))}` : ""}: `, make("span", { class: "dim" }, t.get("text", row).slice(0, 120)));
      const list = (title, rows, none) => make("article", {}, make("h3", {}, title), rows.length ? make("ol", {}, rows.map(item)) : make("p", { class: "dim" }, none));
      const since = seen.since == null ? "the reward rose" : `step ${seen.since}, when the reward had risen half of its way`;
      $("look").append(make("div", { class: "cards" },
        list("Highest reward, of a new kind", seen.new_kind, seen.since == null ? "The reward has not risen, so nothing can be new since then."
          : `Among the answers of highest reward none is unlike those before ${since}.`),
        list("Longest", seen.longest, "Nothing was sampled."), list("Largest gap of trainer and engine", seen.largest_gap, "No gap was measured.")));
    });
  }

  function groups() {
    RUNS.forEach((run, n) => {
      const t = table(n);
      if (heading(run)) $("groups").append(heading(run));
      if (!t) return $("groups").append(make("p", { class: "dim" }, "There are no trajectories: see the note at the top of the page."));
      const shares = make("div", { class: "plot", role: "img", "aria-label": "share of flat and of filtered groups over the steps" });
      const dots = make("div", { class: "plot", role: "img", "aria-label": "rewards of siblings over the steps" });
      const found = points(t);
      $("groups").append(make("p", { class: "hint" }, "Each dot is an answer, each column of dots a group. A click opens the nearest."
        + (found.left ? ` ${found.rows.length} answers are drawn, evenly; ${found.left} are not.` : "")), dots, make("h3", {}, "Share of groups"), shares);
      chart(dots, () => ({ data: found.data, click: (k) => go(n, t.get("step", found.rows[k]), t.get("number", found.rows[k])),
        series: [["learnt from", 0], ["flat", 7], ["filtered", 1]].map(([label, c]) => ({ label, stroke: colour(c), paths: () => null,
          value: (u, v) => figure(v), points: { show: true, size: 5, fill: colour(c) + "90", stroke: colour(c) } })) }), 260);
      chart(shares, () => groupShares(t), 170);
    });
  }

  function points(t) {
    const all = [...groupsOf(t).values()].filter((rows) => t.get("tag", rows[0]) !== "evaluation");
    const count = all.reduce((sum, rows) => sum + rows.length, 0), stride = Math.max(1, count / MOST_DOTS), taken = [];
    for (let n = 0; n < all.length; n += stride) taken.push(all[Math.floor(n)]);
    const width = new Map(), place = new Map();
    for (const rows of taken) width.set(t.get("step", rows[0]), (width.get(t.get("step", rows[0])) || 0) + 1);
    const found = [];
    for (const rows of taken) {
      const step = t.get("step", rows[0]), n = place.get(step) || 0;
      place.set(step, n + 1);
      for (const row of rows) if (t.get("reward", row) != null && t.get("role", row) === "answer") found.push([step + 0.8 * (n / width.get(step)), row]);
    }
    found.sort((a, b) => a[0] - b[0]);
    const rows = found.map(([, row]) => row);
    const kind = (row) => (t.get("tag", row) === "filtered" ? 2 : t.get("flat", row) ? 1 : 0);
    const of = (wanted) => rows.map((row) => (kind(row) === wanted ? t.get("reward", row) : null));
    return { rows, data: [found.map(([x]) => x), of(0), of(1), of(2)], left: count - taken.reduce((sum, g) => sum + g.length, 0) };
  }

  function groupShares(t) {
    const steps = new Map();
    for (const rows of groupsOf(t).values()) {
      if (t.get("tag", rows[0]) === "evaluation") continue;
      const step = t.get("step", rows[0]), counts = steps.get(step) || [0, 0, 0];
      counts[0]++;
      if (t.get("flat", rows[0])) counts[1]++;
      if (t.get("tag", rows[0]) === "filtered") counts[2]++;
      steps.set(step, counts);
    }
    const order = [...steps.keys()].sort((a, b) => a - b);
    const line = (k) => order.map((step) => steps.get(step)[k] / steps.get(step)[0]);
    const series = [["flat", 7], ["turned down by dynamic filtering", 1]].map(([label, c]) => ({ label, stroke: colour(c), width: 2, value: (u, v) => figure(v), points: { show: order.length < 80 } }));
    return { data: [order, line(1), line(2)], series };
  }

  // -- start -----------------------------------------------------------------------------------

  function refresh() {
    let stamp = null;
    setInterval(async () => {
      const reply = await fetch("stamp").catch(() => null);
      const now = reply && reply.ok ? await reply.text() : stamp;
      if (stamp !== null && now !== stamp) location.reload();
      stamp = now;
    }, 5000);
  }

  overview();
  curves();
  // the tables are large: the first screen is painted before they are read
  requestAnimationFrame(() => setTimeout(() => {
    look();
    rollouts();
    groups();
    addSpreads();
    addEventListener("hashchange", fromAddress);
    fromAddress();
    document.documentElement.dataset.ready = "yes";
    performance.mark("ready");
  }));
  if (DATA.served) refresh();
})();
