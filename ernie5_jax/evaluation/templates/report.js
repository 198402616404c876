// Reading values off the loss curves: the nearest logged step under the pointer.
for (const plot of document.querySelectorAll(".plot")) {
  const points = JSON.parse(plot.dataset.points);
  const svg = plot.querySelector("svg");
  const mark = svg.querySelector(".hover");
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  plot.append(tip);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const [x, y, step, value] = points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
    mark.setAttribute("visibility", "visible");
    mark.querySelector("line").setAttribute("x1", x);
    mark.querySelector("line").setAttribute("x2", x);
    mark.querySelector("circle").setAttribute("cx", x);
    mark.querySelector("circle").setAttribute("cy", y);
    tip.textContent = `step ${step}: ${value.toFixed(3)}`;
    tip.hidden = false;
    tip.style.left = `${Math.min((x / svg.viewBox.baseVal.width) * box.width, box.width - tip.offsetWidth)}px`;
  });
  svg.addEventListener("pointerleave", () => {
    mark.setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
}
