"""The page's style and its script: one read-out for all charts. No page depends on the script to be read."""

STYLE = """
:root{
  --bg:#fff;--panel:#fff;--soft:#f4f6f8;--line:#dde2e8;--text:#17202b;--dim:#5a6675;
  --good:#0b6b4b;--good-bg:#dff4ea;--warn:#7a4d00;--warn-bg:#fdf0d2;--bad:#a11b1b;--bad-bg:#fde4e2;
  --busy:#1550a0;--busy-bg:#e0ecfb;
  --c0:#1d5fc4;--c1:#c2470a;--c2:#0a7a5c;--c3:#8a3ea6;--c4:#8a6a00;--c5:#c0266d;--c6:#4d5966;--c7:#0b7285
}
@media (prefers-color-scheme:dark){:root{
  --bg:#10151b;--panel:#171d25;--soft:#1d2530;--line:#2f3945;--text:#e6ebf1;--dim:#9aa7b6;
  --good:#7fe0b5;--good-bg:#0f3527;--warn:#f5cd79;--warn-bg:#3b2d0c;--bad:#ff9d94;--bad-bg:#43191a;
  --busy:#9cc6ff;--busy-bg:#152f52;
  --c0:#6ea8ff;--c1:#ff9a5c;--c2:#4fd1a5;--c3:#d29bf0;--c4:#e3c34f;--c5:#ff8bbd;--c6:#aab6c3;--c7:#5cc9de
}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);
  font:15px/1.5 system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 8px}
header{display:flex;flex-wrap:wrap;align-items:center;gap:6px 14px;margin-bottom:18px}
h1{font-size:24px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:18px;margin:34px 0 10px}
h3{font-size:14px;margin:0}
small{color:var(--dim);font-weight:400;font-size:13px}
code,pre{font:13px/1.5 ui-monospace,"Cascadia Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  overflow-wrap:anywhere}
.sub{color:var(--dim);margin:0;flex-basis:100%}
.status{display:inline-block;padding:1px 10px;border-radius:999px;font-size:13px;font-weight:600;
  white-space:nowrap}
.good{color:var(--good);background:var(--good-bg)}.warn{color:var(--warn);background:var(--warn-bg)}
.bad{color:var(--bad);background:var(--bad-bg)}.busy{color:var(--busy);background:var(--busy-bg)}
.error{color:var(--bad);background:var(--bad-bg);padding:10px 14px;border-radius:8px;margin:0 0 18px;
  overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(148px,1fr));gap:12px;margin-bottom:14px}
.card{background:var(--soft);border-radius:10px;padding:10px 14px;min-width:0}
.card h2{font-size:13px;font-weight:500;color:var(--dim);margin:0;overflow-wrap:anywhere}
.card p{font-size:20px;font-weight:650;margin:1px 0;font-variant-numeric:tabular-nums;
  overflow-wrap:anywhere}
.card.main{box-shadow:inset 3px 0 var(--c0)}
.card.main p{font-size:24px;line-height:1.25}
.card small{display:block;overflow-wrap:anywhere}
.charts{margin-top:14px;display:grid;grid-template-columns:repeat(12,minmax(0,1fr));gap:14px}
.chart{grid-column:span 4;display:flex;flex-direction:column;justify-content:space-between;
  margin:0;min-width:0;border:1px solid var(--line);border-radius:10px;background:var(--panel);
  padding:12px 16px 8px}
.w3{grid-column:span 3}.w6{grid-column:span 6}
.frame{display:grid;grid-template:170px 24px/46px 1fr;margin-top:8px}
.w6 .frame{grid-template-rows:240px 24px}
figcaption{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 14px;min-height:24px}
.legend{display:flex;flex-wrap:wrap;gap:0 14px;margin:0;padding:0;list-style:none;font-size:13px;
  color:var(--dim)}
.legend b{color:var(--text);font-variant-numeric:tabular-nums}
.swatch{width:20px;height:8px;margin-right:5px;vertical-align:middle;flex:none}
.swatch path{stroke-width:2.5}
.ys,.xs{position:relative;font-size:12px;color:var(--dim);font-variant-numeric:tabular-nums}
.ys span{position:absolute;right:7px;transform:translateY(50%);line-height:1}
.step{font-size:12px;line-height:1;color:var(--dim);text-align:right;padding:8px 7px 0 0}
.xs span{position:absolute;top:8px;transform:translateX(-50%);white-space:nowrap;line-height:1}
.area{position:relative;border-left:1px solid var(--line);border-bottom:1px solid var(--line);
  touch-action:pan-y}
.area:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
.area>svg{position:absolute;inset:0;width:100%;height:100%;overflow:hidden;display:block}
path{fill:none;stroke:var(--c);vector-effect:non-scaling-stroke}
.grid{stroke:var(--line);stroke-width:1}
.mark{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 4}
.line{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.dots{stroke-width:6;stroke-linecap:round;stroke-dasharray:none!important}
.pale{opacity:.55}
.faint{opacity:.3;stroke-width:1.2}
.c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--c5)}.c6{--c:var(--c6)}.c7{--c:var(--c7)}
.d1{stroke-dasharray:7 4}.d2{stroke-dasharray:2 4}.d3{stroke-dasharray:9 3 2 3}
.d1 path{stroke-dasharray:5 3}.d2 path{stroke-dasharray:2 3}.d3 path{stroke-dasharray:6 2 2 2}
.cursor{position:absolute;top:0;bottom:0;width:1px;background:var(--dim);pointer-events:none}
.tip{position:absolute;z-index:2;pointer-events:none;background:var(--bg);border:1px solid var(--line);
  border-radius:8px;
  padding:6px 10px;font-size:13px;line-height:1.45;box-shadow:0 4px 14px #0003;white-space:nowrap;
  font-variant-numeric:tabular-nums}
.tip b{float:right;margin-left:14px}
.tip div{clear:both}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;min-width:50%}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
thead th{font-weight:500;color:var(--dim);font-size:13px;white-space:nowrap}
tbody th{font-weight:600}
th.num,td.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.facts th{width:110px;font-weight:500;color:var(--dim);white-space:nowrap}
.facts td{overflow-wrap:anywhere}
.facts td code:not(:last-child){margin-right:8px}
.examples{list-style:none;margin:6px 0 22px;padding:0}
.examples li{display:flex;gap:16px;padding:9px 0;border-bottom:1px solid var(--line)}
.examples li>p{flex:1;min-width:0}
.examples small{overflow-wrap:anywhere}
.verdict{flex:none;width:92px;height:24px;border-radius:6px;font-size:13px;line-height:24px;
  text-align:center}
.words,.key{display:flex;flex-wrap:wrap;gap:4px 8px;margin:0;align-items:flex-start}
.word{display:inline-flex;flex-direction:column;line-height:1.4;min-width:0;overflow-wrap:anywhere}
.word.replace,.word.delete,.word.insert{border-radius:5px;padding:0 5px;text-align:center;
  background:var(--bad-bg);color:var(--bad)}
.word.replace span:last-child,.word.insert span:last-child{font-weight:650}
.word.replace span:first-child,.word.delete span:first-child{text-decoration:line-through;
  text-decoration-thickness:1px}
.word.delete{background:var(--warn-bg);color:var(--warn)}
.word.insert{background:var(--busy-bg);color:var(--busy)}
.word.insert span:last-child{text-decoration:underline;text-underline-offset:3px}
.key{font-size:13px;margin-bottom:14px}
.warnings{margin:0;padding-left:20px}
details{margin-top:16px}
summary{cursor:pointer;font-weight:600}
details.run{border:1px solid var(--line);border-radius:10px;padding:12px 16px}
details.run .sub,details.run[open]>summary{margin-bottom:12px}
pre{background:var(--soft);border-radius:10px;padding:14px 16px;overflow-x:auto;overflow-wrap:normal;
  margin:10px 0 0}
footer{max-width:1240px;margin:0 auto;padding:24px;color:var(--dim);font-size:13px}
@media (max-width:1000px){.chart{grid-column:span 6}}
@media (max-width:600px){
  main{padding:18px 14px 4px}
  .charts{gap:12px}
  .chart{grid-column:span 12;padding:10px 12px 6px}
  .chart .frame{grid-template:180px 24px/42px 1fr}
  .cards{grid-template-columns:repeat(2,1fr);gap:8px}
  .examples li{flex-direction:column;gap:5px}
  .facts th{width:84px}
}
@media print{details::details-content{content-visibility:visible}.chart{break-inside:avoid}}
"""

SCRIPT = """
"use strict";
const show = v => Number(v.toPrecision(4)).toLocaleString("en", {maximumSignificantDigits: 4});
for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const area = figure.querySelector(".area");
  const [low, high] = data.x;
  const steps = [...new Set(data.lines.flatMap(line => line.x))].sort((a, b) => a - b);
  const cursor = document.createElement("div"), tip = document.createElement("div");
  cursor.className = "cursor";
  tip.className = "tip";
  let at = -1;

  const nearest = (list, x) => {
    let from = 0, to = list.length - 1;
    while (to - from > 1) {
      const middle = (from + to) >> 1;
      if (list[middle] < x) from = middle; else to = middle;
    }
    return Math.abs(list[from] - x) <= Math.abs(list[to] - x) ? from : to;
  };

  const point = index => {
    at = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[at], share = (step - low) / (high - low);
    tip.replaceChildren(row("step", step.toLocaleString("en")));
    const most = 16;
    let named = 0;
    for (const line of data.lines) {
      const i = nearest(line.x, step);
      // a line is named only where it has a point about as near as a pixel or two
      if (Math.abs(line.x[i] - step) > (high - low) / 100) continue;
      if (++named > most) continue;
      const value = line.y[i] === null ? "not finite" : show(line.y[i]) + (data.unit && " " + data.unit);
      tip.append(row(line.label, value, line.style));
    }
    if (named > most) tip.append(row("…", `${named - most} more`));
    area.append(cursor, tip);
    cursor.style.left = 100 * share + "%";
    tip.style.top = "8px";
    tip.style.left = share < 0.5 ? `calc(${100 * share}% + 10px)` : "auto";
    tip.style.right = share < 0.5 ? "auto" : `calc(${100 * (1 - share)}% + 10px)`;
  };

  const row = (name, value, style) => {
    const line = document.createElement("div"), bold = document.createElement("b");
    bold.textContent = value;
    if (style) {
      const sample = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      sample.setAttribute("class", "swatch " + style);
      sample.setAttribute("viewBox", "0 0 20 8");
      path.setAttribute("d", "M0 4H20");
      sample.append(path);
      line.append(sample);
    }
    line.append(name, bold);
    return line;
  };

  const clear = () => { cursor.remove(); tip.remove(); at = -1; };
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect();
    point(nearest(steps, low + (high - low) * (event.clientX - box.left) / box.width));
  });
  area.addEventListener("pointerdown", event => {
    const box = area.getBoundingClientRect();
    point(nearest(steps, low + (high - low) * (event.clientX - box.left) / box.width));
  });
  area.addEventListener("pointerleave", clear);
  area.addEventListener("blur", clear);
  area.addEventListener("keydown", event => {
    const moves = {ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length};
    if (event.key === "Escape") clear();
    if (!(event.key in moves)) return;
    event.preventDefault();
    point(at < 0 ? (moves[event.key] < 0 ? steps.length - 1 : 0) : at + moves[event.key]);
  });
}
"""
