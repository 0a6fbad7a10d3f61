/* Says of every card, each in a frame of its own, how the browser has laid it out: as JSON in the page itself. */
function luminance(colour) {
  const [r, g, b] = colour.match(/[\d.]+/g).map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function rect(element) {
  const { left, top, right, bottom } = element.getBoundingClientRect();
  return [left, top, right, bottom];
}

function probe(frame) {
  const d = frame.contentDocument, card = d.querySelector(".jaxsub"), style = frame.contentWindow.getComputedStyle(card);
  const all = (selector) => [...d.querySelectorAll(selector)];
  all("details").forEach((e) => (e.open = true));
  const room = d.documentElement.clientWidth;
  const isWide = (e) => rect(e)[2] > room + 1 || (e.scrollWidth > e.clientWidth + 1 && e.clientWidth);
  const [dim, bright] = [luminance(style.color), luminance(style.backgroundColor)].sort((a, b) => a - b);
  const found = {
    name: frame.name, room, width: d.documentElement.scrollWidth,
    wide: all(".jaxsub *").filter((e) => !/svg|path/i.test(e.tagName) && isWide(e)).map((e) => e.outerHTML.slice(0, 90)),
    contrast: (bright + 0.05) / (dim + 0.05), dark: luminance(style.backgroundColor) < 0.2,
    parts: [".js-tile", ".js-area", "tr"].map((s) => all(s).length), text: card.innerText.split(/\s+/).join(" "),
    ticks: all(".js-axis").map((axis) => [...axis.children].map(rect)),
    peaks: all(".js-area").map((area) => [area, ...area.querySelectorAll(".js-peak, .js-peak-label")].map(rect)),
    fills: all(".js-after, .js-row path").map((e) => frame.contentWindow.getComputedStyle(e).fill),
  };
  const area = d.querySelector(".js-area"), detail = d.querySelector(".js-detail");
  const before = detail && detail.textContent;
  if (area) area.dispatchEvent(new PointerEvent("pointermove", { clientX: rect(area)[0] + 2 }));
  return { ...found, moved: Boolean(detail) && detail.textContent !== before };
}

addEventListener("load", () => {
  const found = [...document.querySelectorAll("iframe")].map(probe);
  document.getElementById("out").textContent = JSON.stringify(found);
});
