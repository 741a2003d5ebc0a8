// Draws figures, each in its place.
const drawFigures = ({figures, roots}) =>
  Bokeh.embed.embed_items({figures}, [{docid: "figures", roots, root_ids: Object.keys(roots)}]);

// Figures are zoomed along the horizontal axis by keys: + and - zoom, arrows move, 0 goes back.
(() => {
  const zoom = (plot, key) => {
    const range = plot.x_range, log = plot.x_scale.type === "LogScale";
    if (key === "0") { range.reset(); return; }
    const [low, high] = log ? [Math.log(range.start), Math.log(range.end)] : [range.start, range.end];
    const width = high - low, size = key === "+" ? 0.5 * width : key === "-" ? 2 * width : width;
    const middle = (low + high) / 2 + (key === ">" ? 0.25 : key === "<" ? -0.25 : 0) * width;
    const ends = [middle - size / 2, middle + size / 2];
    [range.start, range.end] = log ? ends.map(Math.exp) : ends;
  };
  const keys = {"+": "+", "=": "+", "-": "-", "0": "0", "Escape": "0", "ArrowLeft": "<", "ArrowRight": ">"};
  // Bokeh's own layer of each figure would be a second stop of Tab, with no name and no outline.
  document.addEventListener("focusin", () => {
    for (const {canvas_view} of Bokeh.index) if (canvas_view) canvas_view.events_el.tabIndex = -1;
  });
  document.addEventListener("keydown", event => {
    const figure = document.activeElement.closest?.("figure"), key = keys[event.key];
    if (!figure || !key || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const done = new Set();  // figures one above another share their axis
    for (const root of figure.querySelectorAll("[data-root-id]")) {
      const plot = Bokeh.documents.map(d => d.get_model_by_id(root.dataset.rootId)).find(m => m);
      if (plot && !done.has(plot.x_range.id)) { done.add(plot.x_range.id); zoom(plot, key); }
    }
  });
})();
