// Asks for news while the page is seen. Texts change where they stand, and figures take the new numbers over: the
// reader's place, zoom, focus and marked text stay.
(() => {
  const [bar, top, rest] = ["bar", "top", "rest"].map(id => document.getElementById(id));
  const run = new URLSearchParams(location.search).get("run") ?? "0";
  let seen = "";  // version of what is said first
  let drawn = null;  // version of the figures, Bokeh's document, its views, and the names and ids of its models

  const parsed = html => Object.assign(document.createElement("div"), {innerHTML: html});

  // An element becomes like a fresh one. Elements stay if they can, and figures always.
  const renew = (old, fresh) => {
    if (old.isEqualNode(fresh) || old.className === "drawn") return;
    for (const {name, value} of fresh.attributes) old.setAttribute(name, value);
    const hasText = [...fresh.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim() !== "");
    if (hasText || fresh.children.length === 0) { old.replaceChildren(...fresh.childNodes); return; }
    let at = old.firstElementChild;
    const removeUpTo = end => { while (at !== end) { const gone = at; at = at.nextElementSibling; gone.remove(); } };
    for (const node of [...fresh.children]) {
      let same = at;
      while (same && (same.nodeName !== node.nodeName || same.className !== node.className)) same = same.nextElementSibling;
      if (!same) { old.insertBefore(node, at); continue; }
      removeUpTo(same);
      at = same.nextElementSibling;
      renew(same, node);
    }
    removeUpTo(null);
  };

  // The models of a document, in an order that only depends on what is drawn.
  const modelsIn = json => Array.isArray(json) ? json.flatMap(modelsIn) : json === null || typeof json !== "object" ? []
    : [...(json.name && json.id ? [json] : []), ...Object.values(json).flatMap(modelsIn)];

  // A range that the reader has zoomed stays, and goes back to the whole of what is drawn now.
  const setRange = (range, {start, end}) => {
    const isZoomed = range.reset_start !== null && (range.start !== range.reset_start || range.end !== range.reset_end);
    range.setv({reset_start: start, reset_end: end, ...(isZoomed ? {} : {start, end})});
  };

  // Give the models that are drawn the values of fresh ones.
  const takeOver = (figures, models) => {
    const fresh = drawn.doc.constructor.from_json(figures);
    Bokeh.documents.pop();  // where Bokeh would keep it
    const holdsModels = value => value?.properties || value instanceof Map && holdsModels([...value.values()])
      || Array.isArray(value) && value.some(holdsModels);
    models.forEach(({id}, k) => {
      const [model, given] = [drawn.doc.get_model_by_id(drawn.models[k].id), fresh.get_model_by_id(id)];
      if (model.type === "Range1d") { setRange(model, given); return; }
      const values = [...given].filter(each => each.dirty && !holdsModels(each.get_value()));
      model.setv(Object.fromEntries(values.map(each => [each.attr, each.get_value()])));
    });
  };

  const show = async ({version, rest: html, figures, roots}) => {
    const fresh = parsed(html), models = modelsIn(figures);
    const kinds = models => models.map(model => model.name).join();
    if (drawn && kinds(drawn.models) === kinds(models)) {
      renew(rest, fresh);
      takeOver(figures, models);
    } else {  // something is drawn for the first time, as after a restart
      rest.style.minHeight = `${rest.offsetHeight}px`;  // the reader stays where they are
      for (const views of drawn?.views ?? []) views.clear();
      drawn?.doc.clear();
      Bokeh.documents.length = 0;
      rest.replaceChildren(...fresh.childNodes);
      const views = await drawFigures({figures, roots});
      drawn = {views, models, doc: Bokeh.documents[0]};
      for (const model of models.map(({id}) => drawn.doc.get_model_by_id(id)))
        if (model.type === "Range1d") setRange(model, model);
    }
    drawn.version = version;
  };

  const asked = async path => {
    const query = new URLSearchParams(location.search);
    query.set("run", run);
    query.set("seen", seen);
    const answer = await fetch(`${path}?${query}`).catch(() => {
      throw new Error("sonde watch does not answer: it has ended, or the connection to its machine is cut. This is what it said last.");
    });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };

  const ask = async () => {
    const news = await asked("news");
    renew(bar, parsed(news.bar));
    document.title = news.title;
    if (news.top !== undefined) renew(top, parsed(news.top));
    seen = news.version;
    if (drawn?.version !== seen) await show(await asked("figures"));
  };

  (async () => {
    for (;;) {
      const began = performance.now();
      try {
        if (!document.hidden) await ask();
      } catch (error) {
        bar.querySelector("[role=status]").textContent = error.message;
      }
      // Work takes half of the time at most.
      await new Promise(done => setTimeout(done, Math.max(100, performance.now() - began)));
    }
  })();
})();
