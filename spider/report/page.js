// Reads values out of a chart under the pointer or finger; a page without it lacks only that.
for (const chart of document.querySelectorAll("figure.chart")) {
  const series = JSON.parse(chart.dataset.values);
  if (!series.length) continue;
  const plot = chart.querySelector(".plot");
  const ruler = plot.appendChild(document.createElement("div"));
  const told = plot.appendChild(document.createElement("div"));
  ruler.className = "ruler";
  told.className = "told";
  const hide = () => (ruler.hidden = told.hidden = true);
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const at = (100 * (event.clientX - box.left)) / box.width;
    told.replaceChildren();
    let nearest = null;
    for (const one of series) {
      let i = 0;
      one.x.forEach((x, k) => { if (Math.abs(x - at) < Math.abs(one.x[i] - at)) i = k; });
      if (nearest === null) nearest = one.x[i];
      if (Math.abs(one.x[i] - nearest) > 3) continue;
      const line = told.appendChild(document.createElement("div"));
      line.style.setProperty("--own", `var(--c${one.colour})`);
      line.textContent = (series.length > 1 ? one.name + ": " : "") + one.said[i];
    }
    ruler.style.left = nearest + "%";
    ruler.hidden = told.hidden = false;
    told.classList.toggle("left", nearest > 55);
    told.style.left = nearest + "%";
  };
  hide();
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", hide);
}
// Paper shows all of it.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
