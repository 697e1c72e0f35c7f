// Show the values of a chart at the pointer. The page works without this script.
for (const chart of document.querySelectorAll("figure.chart")) {
  const series = JSON.parse(chart.dataset.values);
  if (!series.length) continue;
  const plot = chart.querySelector(".plot");
  const ruler = plot.appendChild(document.createElement("div"));
  const tooltip = plot.appendChild(document.createElement("div"));
  ruler.className = "ruler";
  tooltip.className = "tooltip";
  const hide = () => (ruler.hidden = tooltip.hidden = true);
  const show = (event) => {
    const box = plot.getBoundingClientRect();
    const at = (100 * (event.clientX - box.left)) / box.width;
    tooltip.replaceChildren();
    let nearest = null;
    for (const one of series) {
      let i = 0;
      one.x.forEach((x, k) => { if (Math.abs(x - at) < Math.abs(one.x[i] - at)) i = k; });
      if (nearest === null) nearest = one.x[i];
      if (Math.abs(one.x[i] - nearest) > 3) continue;
      const line = tooltip.appendChild(document.createElement("div"));
      line.style.setProperty("--own", `var(--c${one.colour})`);
      line.textContent = (series.length > 1 ? one.name + ": " : "") + one.texts[i];
    }
    ruler.style.left = nearest + "%";
    ruler.hidden = tooltip.hidden = false;
    tooltip.classList.toggle("left", nearest > 55);
    tooltip.style.left = nearest + "%";
  };
  hide();
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", hide);
}
// Print all details.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((one) => (one.open = true)));
