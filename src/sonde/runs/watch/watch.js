// Asks for news every second while the page is seen. What has changed is swapped; the reader's place and zoom stay.
(() => {
  const token = new URLSearchParams(location.search).get("token") ?? "";
  const [runs, live, problem, first] = ["runs", "live", "problem", "first"].map(id => document.getElementById(id));
  let rest = document.getElementById("rest");
  let shown = location.hash.slice(1) || "0";  // number of the run
  let seen = {first: "", rest: ""};  // versions
  let drawn = null;  // Bokeh's document, its views and listeners, and the figures by name
  let isPressed = false;

  const title = section => section.querySelector("h2").textContent;

  // The first section in sight stays where it is, whatever becomes longer above it.
  const keepingPlace = change => {
    const before = [...rest.querySelectorAll("section")].find(each => each.getBoundingClientRect().bottom > 0);
    const name = before && title(before), top = before?.getBoundingClientRect().top;
    change();
    const after = [...rest.querySelectorAll("section")].find(each => title(each) === name);
    if (after && scrollY > 0 && top < innerHeight) scrollBy(0, after.getBoundingClientRect().top - top);
  };

  // Figures by section, place and axis. A figure is zoomed if its range is not the one that it came with.
  const figuresIn = (box, doc) => new Map([...box.querySelectorAll("section")].flatMap(section =>
    [...section.querySelectorAll("[data-root-id]")].map((place, k) => {
      const plot = doc.get_model_by_id(place.dataset.rootId), {start, end} = plot.x_range;
      return [`${title(section)} ${k} ${plot.below[0].axis_label.text}`, {range: plot.x_range, start, end}];
    })));

  // Bokeh 3.9 leaves a listener of each figure here for ever, which would keep every figure that was ever drawn.
  let listeners = [];
  if (window.visualViewport) {
    const add = visualViewport.addEventListener.bind(visualViewport);
    visualViewport.addEventListener = (type, listener) => { listeners.push(listener); add(type, listener); };
  }

  const erase = old => {
    if (!old) return;
    for (const views of old.views) views.clear();
    old.doc.clear();
    Bokeh.documents.splice(Bokeh.documents.indexOf(old.doc), 1);
    for (const listener of old.listeners) visualViewport.removeEventListener("resize", listener);
  };

  const swapRest = async (run, {version, html, document: figures, roots}) => {
    const fresh = document.createElement("div");
    fresh.className = "coming";
    fresh.style.width = `${rest.clientWidth}px`;
    fresh.innerHTML = html;
    rest.after(fresh);
    listeners = [];
    const views = await Bokeh.embed.embed_items({figures}, [{docid: "figures", roots, root_ids: Object.keys(roots)}]);
    const doc = Bokeh.documents.at(-1), now = figuresIn(fresh, doc);
    for (const [name, {range}] of now) {
      const old = drawn?.figures.get(name);
      if (old && (old.range.start !== old.start || old.range.end !== old.end))
        [range.start, range.end] = [old.range.start, old.range.end];
    }
    if (!doc.is_idle)
      await Promise.race([new Promise(done => doc.idle.connect(done)), new Promise(done => setTimeout(done, 5000))]);
    const next = {doc, views, listeners, figures: now};
    if (run !== shown || isBusy()) {  // meanwhile another run was chosen, or the reader began to drag
      fresh.remove();
      erase(next);
      return;
    }
    const focused = [...rest.querySelectorAll("figure")].indexOf(document.activeElement);
    const scrolled = [...rest.querySelectorAll(".tall, .table")].map(box => [box.scrollTop, box.scrollLeft]);
    keepingPlace(() => {
      rest.remove();
      rest = fresh;
      rest.className = rest.style.width = "";
    });
    rest.querySelectorAll(".tall, .table").forEach((box, k) => [box.scrollTop, box.scrollLeft] = scrolled[k] ?? [0, 0]);
    rest.querySelectorAll("figure")[focused]?.focus({preventScroll: true});
    erase(drawn);
    drawn = next;
    seen.rest = version;
  };

  const list = news => {
    runs.closest("nav").hidden = news.length < 2;
    news.forEach(({name, badges, live, problem}, k) => {
      if (!runs.children[k]) {  // links stay, so that one can have the focus
        const item = document.createElement("li");
        item.innerHTML = `<a href="#${k}"><b></b> <span></span></a>`;
        runs.append(item);
      }
      const link = runs.children[k].firstChild;
      link.querySelector("b").textContent = name;
      link.querySelector("span").textContent = `${badges} · ${live}`;
      link.ariaCurrent = String(String(k) === shown);
      link.classList.toggle("troubled", problem !== "");
    });
    const own = news[shown];
    live.textContent = news.length < 2 ? own.live[0].toUpperCase() + own.live.slice(1) : "";
    say(own.problem);
    document.title = `${own.name}: ${own.badges}`;
  };

  const say = text => { if (problem.textContent !== text) problem.textContent = text; };

  const fetched = async (path, run, version) => {
    let answer;
    try {
      answer = await fetch(`${path}?${new URLSearchParams({token, run, seen: version})}`);
    } catch {
      throw new Error("sonde watch does not answer: it has ended, or the connection to its machine is cut. This is what it said last.");
    }
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };

  const askFirst = async () => {
    const run = shown, news = await fetched("news", run, seen.first);
    if (run !== shown) return;
    list(news.runs);
    if (!news.first) return;
    keepingPlace(() => first.innerHTML = news.first.html);
    seen.first = news.first.version;
  };

  const askRest = async () => {  // apart, since figures can take a second to draw
    const run = shown, news = await fetched("figures", run, seen.rest);
    if (news.rest && run === shown) await swapRest(run, news.rest);
  };

  // While the reader drags in a figure or marks text, nothing is taken away.
  const isBusy = () => isPressed || !getSelection().isCollapsed;
  for (const [event, is] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]])
    addEventListener(event, () => isPressed = is, true);

  addEventListener("hashchange", () => {
    shown = location.hash.slice(1) || "0";
    first.replaceChildren();
    rest.replaceChildren();
    erase(drawn);
    drawn = null;
    seen = {first: "", rest: ""};
    scrollTo(0, 0);
    wake();
  });
  const sleepers = new Map();
  const wake = () => sleepers.forEach(done => done());
  addEventListener("visibilitychange", wake);

  const everySecond = async ask => {
    for (;;) {
      try {
        if (isBusy()) live.textContent = "Stands still while text is marked.";
        else if (!document.hidden) await ask();
      } catch (error) {
        say(error.message);
      }
      await new Promise(done => { sleepers.set(ask, done); setTimeout(done, 1000); });
    }
  };
  everySecond(askFirst);
  everySecond(askRest);
})();
