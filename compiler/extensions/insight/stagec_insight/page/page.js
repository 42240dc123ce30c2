"use strict";
// Draws what the page has as JSON: the bundles in #bundles, and each function's executables in its own script element.
// Nothing is drawn before it is opened. All text goes through textContent: names are anybody's.

const byId = (id) => document.getElementById(id);
const bundles = JSON.parse(byId("bundles").textContent);
const TWO = bundles.length > 1;
const SIDES = TWO ? ["A", "B"] : [""];
// Okabe and Ito's colours, which colour-blind people tell apart (https://jfly.uni-koeln.de/color/).
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999", "#882255"];
const KINDS = { argument: 0, result: 1, temporary: 2, code: 3 };
const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const charts = new Map(); // element -> function that returns its options

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// ---- numbers as people read them

function scaled(value, base, units) {
  let scale = 0;
  while (Math.abs(value) >= base && scale < units.length - 1) [value, scale] = [value / base, scale + 1];
  const digits = scale === 0 ? 0 : Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return `${value.toFixed(digits)} ${units[scale]}`.trim();
}
const known = (value) => typeof value === "number";
const bytes = (value) => (known(value) ? scaled(value, 1024, ["bytes", "KiB", "MiB", "GiB", "TiB"]) : String(value ?? ""));
const count = (value) => (known(value) ? scaled(value, 1000, ["", "K", "M", "G", "T", "P"]) : String(value ?? ""));
function seconds(value) {
  if (!known(value)) return String(value ?? "");
  if (value === 0) return "0 s";
  const [factor, unit] = value >= 1 ? [1, "s"] : value >= 1e-3 ? [1e3, "ms"] : value >= 1e-6 ? [1e6, "µs"] : [1e9, "ns"];
  return `${(value * factor).toPrecision(3)} ${unit}`;
}
function change(before, after) {
  if (!known(before) || !known(after)) return "";
  if (before === after) return "same";
  return before ? `${after > before ? "+" : ""}${(100 * (after / before - 1)).toFixed(1)} %` : "new";
}

// ---- tables

// rows: lists of texts; a text in a list [text] is a number, and stands on the right.
function table(caption, head, rows) {
  const cell = (tag, value, scope) => {
    const number = Array.isArray(value);
    const made = element(tag, { ...(number ? { class: "number" } : {}), ...(scope ? { scope } : {}) });
    made.append(number ? value[0] : value);
    return made;
  };
  const body = rows.map((row) => element("tr", {}, ...row.map((value, i) => cell(i ? "td" : "th", value, i ? "" : "row"))));
  return element(
    "div", { class: "wide", tabindex: "0", role: "region", "aria-label": caption },
    element("table", {}, element("caption", { class: "soft" }, caption),
      element("thead", {}, element("tr", {}, ...head.map((value) => cell("th", value, "col")))),
      element("tbody", {}, ...body)),
  );
}

// A chart with its title, what it says in words, and the same as a table.
function figure(title, words, options, content) {
  const place = options ? element("div", { class: "chart", role: "img", "aria-label": `${title}. ${words}` }) : null;
  const made = element("figure", {}, element("h3", {}, title), place, element("figcaption", {}, words));
  if (content) made.append(element("details", {}, element("summary", {}, `${title} as a table`), element("div", { class: "body" }, content)));
  if (place) charts.set(place, options);
  return made;
}

// ---- charts

function palette() {
  const night = dark.matches && !printing;
  return night ? { text: "#e8eaee", soft: "#a9aeb8", line: "#434852", back: "#1f2228" } : { text: "#1a1c20", soft: "#53575f", line: "#c9ccd2", back: "#ffffff" };
}

function draw(place) {
  echarts.getInstanceByDom(place)?.dispose();
  const colours = palette();
  const chart = echarts.init(place, null, { renderer: "svg" });
  chart.setOption({
    animation: false, color: COLOURS, textStyle: { color: colours.text, fontFamily: "system-ui, sans-serif" },
    aria: { enabled: true, label: { enabled: false }, decal: { show: true } },
    tooltip: { confine: true, backgroundColor: colours.back, borderColor: colours.line, textStyle: { color: colours.text } },
    ...charts.get(place)(colours),
  });
}

function drawAll(root) {
  for (const place of root.querySelectorAll(".chart")) if (place.offsetParent !== null) draw(place);
}

function redraw() {
  for (const place of [...charts.keys()]) {
    if (!place.isConnected) charts.delete(place);
    else if (echarts.getInstanceByDom(place)) draw(place);
  }
}

const axis = (colours, more) => ({
  axisLabel: { color: colours.soft, hideOverlap: true, ...more.axisLabel }, axisLine: { lineStyle: { color: colours.line } },
  splitLine: { lineStyle: { color: colours.line, opacity: 0.5 } }, nameTextStyle: { color: colours.soft }, ...more.rest,
});
const legend = (colours) => ({ textStyle: { color: colours.text }, top: 0, type: "scroll" });

// rows: {name, value, kind}
function treemap(rows, told) {
  const kinds = [...new Set(rows.map((row) => row.kind))];
  const colour = (kind) => COLOURS[KINDS[kind] ?? kinds.indexOf(kind) % COLOURS.length];
  const total = rows.reduce((sum, row) => sum + row.value, 0);
  const short = (name) => name.replace(/^jit\([^)]*\)\//, "");
  return (colours) => ({
    legend: { show: false },
    tooltip: { confine: true, formatter: (info) => echarts.format.encodeHTML(`${info.name}: ${told(info.value)}`) },
    aria: { enabled: false },
    series: [{
      type: "treemap", roam: false, nodeClick: false, breadcrumb: { show: false }, width: "100%", height: "100%", left: 0, top: 0,
      label: { formatter: (info) => (info.value > total / 40 ? `${short(info.name)}\n${told(info.value)}` : ""), overflow: "truncate", lineHeight: 16 },
      upperLabel: { show: true, height: 22, color: colours.text, formatter: (info) => `${info.name} ${told(info.value)}` },
      itemStyle: { borderColor: colours.back, borderWidth: 1, gapWidth: 1 },
      levels: [{ itemStyle: { gapWidth: 3 }, upperLabel: { show: false } }, { itemStyle: { borderColor: colours.line, borderWidth: 2, gapWidth: 1 } }],
      data: kinds.map((kind) => ({
        name: kind, itemStyle: { color: colour(kind) }, label: { color: colour(kind) === COLOURS[0] ? "#fff" : "#000" },
        children: rows.filter((row) => row.kind === kind).map((row) => ({ name: row.name, value: row.value, label: { color: colour(kind) === COLOURS[0] ? "#fff" : "#000" } })),
      })),
    }],
  });
}

// names: of the bars, the longest first; series: [{name, values}]
function bars(names, series, told, stacked = false) {
  const most = Math.max(...names.map((_, i) => series.reduce((sum, one) => (stacked ? sum + (one.values[i] ?? 0) : Math.max(sum, one.values[i] ?? 0)), 0)));
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / 4))); // whole KiB and MiB at the axis
  return (colours) => ({
    legend: series.length > 1 ? legend(colours) : { show: false },
    grid: { left: 20, right: 60, top: series.length > 1 ? 34 : 8, bottom: 8, containLabel: true },
    tooltip: { confine: true, valueFormatter: told },
    xAxis: axis(colours, { axisLabel: { formatter: told }, rest: { type: "value", ...(told === bytes ? { interval: step } : { splitNumber: 4 }) } }),
    yAxis: axis(colours, { axisLabel: { width: 150, overflow: "truncate" }, rest: { type: "category", data: names, inverse: true } }),
    series: series.map((one) => ({
      type: "bar", name: one.name, data: one.values, stack: stacked ? "all" : undefined, barMaxWidth: 22,
      label: stacked ? undefined : { show: series.length < 2, position: "right", color: colours.text, formatter: (info) => told(info.value) },
    })),
  });
}

function roofline(points) {
  const { flops: peak, bandwidth } = points[0];
  const ridge = peak / bandwidth;
  const all = points.map((point) => point.intensity);
  const [low, high] = [Math.min(ridge / 100, ...all.map((x) => x / 4)), Math.max(ridge * 100, ...all.map((x) => x * 4))];
  const roof = [[low, low * bandwidth], [ridge, peak], [high, peak]];
  return (colours) => ({
    legend: legend(colours), grid: { left: 8, right: 24, top: 34, bottom: 24, containLabel: true },
    tooltip: { confine: true, formatter: (info) => echarts.format.encodeHTML(`${info.seriesName}: ${count(info.value[0])} operations a byte, ${count(info.value[1])} operations a second`) },
    xAxis: axis(colours, { axisLabel: { formatter: count }, rest: { type: "log", min: low, max: high, name: "operations a byte", nameLocation: "middle", nameGap: 24 } }),
    yAxis: axis(colours, { axisLabel: { formatter: count }, rest: { type: "log" } }),
    series: [
      { type: "line", name: "the device's roof", data: roof, showSymbol: false, lineStyle: { width: 3 } },
      ...points.map((point, i) => ({ type: "scatter", name: point.name, data: [[point.intensity, point.rate]], symbol: ["circle", "diamond"][i], symbolSize: 16 })),
    ],
  });
}

// ---- an executable, of one bundle or of both

const METRICS = [
  ["Size of the executable", "size", bytes], ["Peak memory of a device", "peak_bytes", bytes], ["Arguments", "argument_bytes", bytes],
  ["Results", "output_bytes", bytes], ["Results in the memory of arguments", "alias_bytes", bytes], ["Temporaries", "temporary_bytes", bytes],
  ["Code", "code_bytes", bytes], ["Operations of a call", "flops", count], ["Bytes that a call reads and writes", "bytes_accessed", bytes],
  ["Roofline: a call takes at least", "roofline_seconds", seconds], ["Bound by", "bound", String],
  ["Build: XLA and the rest", "compile_seconds", seconds],
];

function metrics(both) {
  const rows = METRICS.map(([title, key, told]) => {
    const values = both.map((one) => (one ? one[key] : undefined));
    if (values.every((value) => value === undefined || value === null)) return null;
    const cells = values.map((value) => [value === undefined || value === null ? "" : told(value)]);
    return [title, ...cells, ...(TWO ? [[change(...values)]] : [])];
  });
  return table("What it takes", ["", ...(TWO ? [["A"], ["B"], ["Change"]] : [["Value"]])], rows.filter(Boolean));
}

function limits(both) {
  const rows = [];
  both.forEach((one, side) => {
    for (const [name, value, limit, kind] of one?.limits ?? []) {
      const told = kind === "bytes" ? bytes : kind === "seconds" ? seconds : count;
      const share = known(value) ? value / limit : null;
      const near = share === null ? "not known" : limit === 0 ? (value ? "over" : "none") : `${(100 * share).toFixed(0)} %`;
      const meter = share === null || !limit ? "" : element("meter", { min: 0, max: 1, high: 0.9, optimum: 0, value: Math.min(share, 1), "aria-label": `${name}: ${near} of the limit` });
      const cell = element("span", share > 1 ? { class: "bad" } : {}, near);
      rows.push([...(TWO ? [`${SIDES[side]}: ${name}`] : [name]), [told(value)], [told(limit)], [cell], meter]);
    }
  });
  return rows.length ? table("Limits, and how near they are", ["Limit", ["now"], ["at most"], ["used"], ""], rows) : element("p", { class: "soft" }, "No limits are known.");
}

function memory(one, side) {
  const rows = one.arrays.map(([kind, name, type, size]) => ({ kind, name: [name, type].filter(Boolean).join(" "), value: size }));
  if (one.more) rows.push({ kind: "temporary", name: `${one.more.count} smaller ones`, value: one.more.bytes });
  const shown = rows.filter((row) => row.value > 0);
  const words = `Arrays on one device, by size. ${one.itemized ? "Not all exist at the same time: " : "The largest use at a time: "}the peak is ${bytes(one.peak_bytes)}.`;
  const title = `Memory by array${TWO ? ` (${SIDES[side]})` : ""}`;
  const content = table("Arrays", ["Kind", "Array", ["Size"]], shown.map((row) => [row.kind, row.name, [bytes(row.value)]]));
  return figure(title, shown.length ? words : "No arrays.", shown.length ? treemap(shown, bytes) : null, shown.length ? content : null);
}

function operations(both) {
  const kinds = [...new Set(both.flatMap((one) => (one?.operations ?? []).map(([kind]) => kind)))];
  if (!kinds.length) return null;
  const find = (one, kind) => (one?.operations ?? []).find((row) => row[0] === kind) ?? [kind, 0, 0];
  const has = kinds.some((kind) => both.some((one) => find(one, kind)[2] > 0));
  const column = has ? 2 : 1;
  const size = (kind) => Math.max(...both.map((one) => (known(find(one, kind)[column]) ? find(one, kind)[column] : 0)));
  kinds.sort((a, b) => size(b) - size(a) || (a < b ? -1 : 1));
  const top = kinds.filter((kind) => size(kind) > 0).slice(0, 10);
  const series = both.map((one, side) => ({ name: SIDES[side] || "operations", values: top.map((kind) => (known(find(one, kind)[column]) ? find(one, kind)[column] : null)) }));
  const words = has ? `Arithmetic operations of a call on one device, by kind of instruction; the most are of ${top[0]}.` : "Instructions that run in a call, by kind; none of them computes.";
  const head = ["Instruction", ...both.flatMap((_, side) => [[`${SIDES[side]} runs`.trim()], [`${SIDES[side]} operations`.trim()]])];
  const rows = kinds.map((kind) => [kind, ...both.flatMap((one) => find(one, kind).slice(1).map((value) => [count(value)]))]);
  return figure("Operations by kind", words, top.length ? bars(top, series, count) : null, table("Operations by kind", head, rows));
}

function exchanges(both) {
  const rows = both.flatMap((one, side) => (one?.exchanges ?? []).map((row) => ({ side, kind: row[0], axes: row[1] || "parts of axes", count: row[2], bytes: row[3], sent: row[4], seconds: row[5] })));
  if (!rows.length) return null;
  const bar = (row) => `${row.kind}${TWO ? ` (${SIDES[row.side]})` : ""}`;
  const names = [...new Set(rows.map(bar))].sort();
  const axes = [...new Set(rows.map((row) => row.axes))].sort();
  const series = axes.map((one) => ({ name: `along ${one}`, values: names.map((name) => rows.filter((row) => bar(row) === name && row.axes === one && known(row.sent)).reduce((sum, row) => sum + row.sent, 0)) }));
  const content = table("Exchanges", ["Kind", "Axes", ["Runs"], ["Arrays"], ["Sent by a device"], ["Links need"]],
    rows.map((row) => [bar(row), row.axes, [count(row.count)], [bytes(row.bytes)], [bytes(row.sent)], [seconds(row.seconds)]]));
  return figure("Exchanges by axis", "Bytes that a device sends in a call, by kind of exchange and axes of the mesh.", bars(names, series, bytes, true), content);
}

function kernels(both) {
  const rows = both.flatMap((one, side) => (one?.kernels ?? []).map(([name, runs, blocks, threads, registers, shared, spills, occupancy, by, least, bound]) => [
    `${name}${TWO ? ` (${SIDES[side]})` : ""}`, [count(runs)], [count(blocks)], [count(threads)], [count(registers)], [bytes(shared)],
    [element("span", spills > 0 ? { class: "bad" } : {}, bytes(spills))], [known(occupancy) ? `${(100 * occupancy).toFixed(0)} % (${by})` : occupancy], [seconds(least)], bound,
  ]));
  if (!rows.length) return null;
  const head = ["Kernel", ["Runs"], ["Blocks"], ["Threads"], ["Registers"], ["Shared memory"], ["Spills"], ["Occupancy"], ["A run takes at least"], "Bound by"];
  return figure("Kernels", "What each takes of a multiprocessor, read from its machine code, and what bounds a run of it, by peak rates.", null, table("Kernels", head, rows));
}

function roof(both) {
  const points = both.map((one, side) => {
    if (!one?.roofline || !known(one.flops) || !known(one.bytes_accessed) || !one.flops || !one.bytes_accessed) return null;
    return { name: TWO ? `program ${SIDES[side]}` : "this program", intensity: one.flops / one.bytes_accessed, rate: one.flops / one.roofline_seconds, ...one.roofline };
  }).filter(Boolean);
  if (!points.length) {
    const one = both.find(Boolean);
    const each = known(one.flops) && known(one.bytes_accessed) && one.bytes_accessed ? `It does ${(one.flops / one.bytes_accessed).toPrecision(3)} operations for each byte. ` : "";
    return figure("Roofline", `${each}The peak rates of this target are not known: an instruction set has none.`, null, null);
  }
  const words = points.map((point) => `${point.name}: ${point.intensity.toPrecision(3)} operations a byte, at most ${count(point.rate)} operations a second`).join("; ");
  const rows = points.map((point) => [point.name, [point.intensity.toPrecision(4)], [count(point.rate)], [count(point.flops)], [bytes(point.bandwidth)]]);
  return figure("Roofline", `${words}. An estimate by peak rates, which nothing reaches.`, roofline(points), table("Roofline", ["", ["operations a byte"], ["operations a second"], ["peak"], ["bytes a second"]], rows));
}

function executable(both) {
  const one = both.find(Boolean);
  const notes = both.flatMap((side, i) => (side ? [...(side.unknown ?? []).map((what) => `${SIDES[i]} not known: ${what}`.trim()), ...(side.avoided ?? [])] : [`only in ${SIDES[1 - i]}`]));
  return element("div", {},
    element("p", {}, `${one.hardware}. `, element("span", { class: "soft" }, one.devices > 1 ? `${one.devices} devices${one.mesh ? `, mesh ${one.mesh}` : ""}. ` : "", notes.join("; "))),
    metrics(both), limits(both),
    element("div", { class: "charts" }, ...both.map((side, i) => (side ? memory(side, i) : null)), operations(both), exchanges(both), roof(both), kernels(both)));
}

function openFunction(details) {
  const data = JSON.parse(details.querySelector("script").textContent);
  const body = details.querySelector(".body");
  const names = Object.keys(data.executables);
  const place = element("div");
  const show = (name) => { place.replaceChildren(executable(data.executables[name])); drawAll(place); redraw(); };
  body.replaceChildren(element("details", {}, element("summary", {}, "How it is called"), element("pre", { class: "body", tabindex: "0" }, data.call)));
  if (names.length > 1) {
    const select = element("select", {}, ...names.map((name) => element("option", { value: name }, name)));
    select.addEventListener("change", () => show(select.value));
    body.append(element("label", { class: "controls" }, "Executable ", select));
  }
  body.append(place);
  if (names.length) show(names[0]);
  else body.append(element("p", { class: "soft" }, "It has no executable: only the exported artifact is in the bundle."));
}

// ---- the whole bundle

function openSizes(details) {
  const body = details.querySelector(".body");
  body.replaceChildren(element("div", { class: "charts" }, ...bundles.map((bundle, side) => {
    const rows = bundle.sizes.map(([kind, name, value]) => ({ kind, name, value })).filter((row) => row.value > 0);
    return figure(`The file${TWO ? ` (${SIDES[side]})` : ""}`, `${bytes(bundle.bytes)} in ${bundle.members} members.`, treemap(rows, bytes), table("What takes the space", ["Kind", "Of", ["Size"]], rows.map((row) => [row.kind, row.name, [bytes(row.value)]])));
  })));
  drawAll(body);
}

function openTimes(details) {
  const body = details.querySelector(".body");
  body.replaceChildren(...bundles.filter((bundle) => bundle.times.length).map((bundle) => {
    const top = bundle.times.slice(0, 15);
    const phases = [...new Set(top.flatMap((row) => Object.keys(row[3])))];
    const series = phases.map((phase) => ({ name: phase, values: top.map((row) => row[3][phase] ?? 0) }));
    const rows = bundle.times.map(([name, command, total]) => [name, command, [seconds(total)]]);
    return figure("Seconds of the build", `The actions that took longest, of ${bundle.times.length}.`, bars(top.map((row) => `${row[0].slice(bundle.name.length + 1)} ${row[1]}`.trim()), series, seconds, true), table("Seconds of the build", ["Artifact", "Action", ["Seconds"]], rows));
  }));
  drawAll(body);
}

for (const details of document.querySelectorAll("details[data-open]")) {
  const open = { function: openFunction, sizes: openSizes, times: openTimes }[details.dataset.open];
  details.addEventListener("toggle", () => {
    if (!details.open || details.dataset.done) return;
    details.dataset.done = "1";
    open(details);
  });
}
document.addEventListener("toggle", (event) => { if (event.target.open) drawAll(event.target); }, true);
const filter = byId("filter");
filter.addEventListener("input", () => {
  const wanted = filter.value.toLowerCase();
  let shown = 0;
  for (const details of document.querySelectorAll(".function")) {
    const matches = details.dataset.name.toLowerCase().includes(wanted);
    details.hidden = !matches;
    shown += matches;
  }
  byId("shown").textContent = `${shown} shown`;
});
function openHash() {
  const details = location.hash.length > 1 ? byId(decodeURIComponent(location.hash.slice(1))) : null;
  if (details?.matches("details")) { details.open = true; details.scrollIntoView(); }
}
addEventListener("hashchange", openHash);
dark.addEventListener("change", redraw);
addEventListener("resize", () => { for (const place of charts.keys()) echarts.getInstanceByDom(place)?.resize(); });
addEventListener("beforeprint", () => { printing = true; redraw(); });
addEventListener("afterprint", () => { printing = false; redraw(); });
const functions = document.querySelectorAll(".function");
if (functions.length === 1 && !location.hash) functions[0].open = true;
openHash();
