"use strict";
// The tree of tensors. Text from the checkpoint reaches the page as text nodes and attributes only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tree = document.getElementById("tree");
  const input = document.getElementById("filter");
  const matches = document.getElementById("matches");
  const CHUNK = 100;
  const SVG = "http://www.w3.org/2000/svg";
  const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
  const keys = data.tensors.map((tensor) => tensor[0].toLowerCase());

  function size(nbytes) {
    let value = nbytes, unit = 0;
    while (value >= 999.5 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
    return unit === 0 ? `${nbytes} B` : `${Number(value.toPrecision(3))} ${UNITS[unit]}`;
  }

  function make(tag, attributes, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function draw(tag, attributes, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

  function ranges(ranks) {
    const parts = [];
    for (const rank of ranks) {
      const last = parts[parts.length - 1];
      if (last && last[1] + 1 === rank) last[1] = rank; else parts.push([rank, rank]);
    }
    return parts.map(([a, b]) => (a === b ? `${a}` : `${a}-${b}`)).join(", ");
  }

  const slice = ([offset, extent]) =>
    `[${offset.map((at, dim) => `${at}:${at + extent[dim]}`).join(", ")}]`;

  // The two dims that are drawn: those that are cut most, else the first two.
  function drawnDims(shape, boxes) {
    const cuts = shape.map((_, dim) => new Set(boxes.map((box) => box[0][dim])).size);
    const dims = shape.map((_, dim) => dim).filter((dim) => shape[dim] > 1);
    dims.sort((a, b) => cuts[b] - cuts[a] || a - b);
    return dims.slice(0, 2).sort((a, b) => a - b);
  }

  function picture([dtype, shape, boxes, count]) {
    const dims = drawnDims(shape, boxes);
    const lengths = dims.map((dim) => shape[dim]);
    const longest = Math.max(1, ...lengths);
    const px = (length) => Math.max(30, Math.round((110 * length) / longest));
    // One dim is drawn from left to right, two as rows and columns.
    const width = dims.length === 2 ? px(lengths[1]) : dims.length ? 150 : 30;
    const height = dims.length === 2 ? Math.min(px(lengths[0]), 84) : 22;
    const few = boxes.slice(0, 8).map((box) => `rank ${box[2]} ${slice(box)}`).join("; ");
    const more = count > 8 ? `; and ${counted(count - 8, "more chunk")}` : "";
    const label = `${counted(count, "chunk")}: ${few}${more}`;
    const svg = draw("svg", {
      class: "placement", role: "img", "aria-label": label, width: width + 2, height: height + 2,
      viewBox: `-1 -1 ${width + 2} ${height + 2}`,
    }, draw("title", {}, label));
    const [rows, columns] = dims.length === 2 ? dims : [undefined, dims[0]];
    for (const [offset, extent, writer] of boxes) {
      const along = (dim, total) => (dim === undefined ? [0, total]
        : [(offset[dim] / shape[dim]) * total, (extent[dim] / shape[dim]) * total]);
      const [x, w] = along(columns, width);
      const [y, h] = along(rows, height);
      svg.append(draw("rect", { x, y, width: w, height: h, class: `w${writer % 8}` }));
      if (w >= 6 + 7 * `${writer}`.length && h >= 11) {
        svg.append(draw("text", { x: x + w / 2, y: y + h / 2 }, `${writer}`));
      }
    }
    return svg;
  }

  function row(number, prefix) {
    const [key, , placement, holder, copies, nbytes] = data.tensors[number];
    const [dtype, shape, , count, writers] = data.placements[placement];
    const name = key.startsWith(prefix) ? key.slice(prefix.length) : key;
    const how = make("td", { title: data.holders[holder][1] }, data.holders[holder][0]);
    return make("tr", {},
      make("th", { scope: "row", class: "key" }, name || key),
      make("td", {}, dtype), make("td", { class: "shape" }, shape.join(" × ") || "scalar"),
      make("td", { class: "num" }, size(nbytes)), make("td", { class: "num" }, `${count}`),
      make("td", { class: "num" }, `${copies}`), make("td", {}, ranges(writers)), how,
      make("td", {}, count ? picture(data.placements[placement]) : "empty"));
  }

  const HEADS = [["Tensor"], ["Type"], ["Shape"], ["Size", 1], ["Chunks", 1], ["Times stored", 1],
    ["Written by"], ["Held"], ["Placement"]];

  // A table of the first tensors, and a button for the next ones: each is made when it is shown.
  function table(numbers, caption, prefix) {
    const body = make("tbody", {});
    const heads = HEADS.map(([head, isNumber]) =>
      make("th", isNumber ? { scope: "col", class: "num" } : { scope: "col" }, head));
    const node = make("table", { class: "tensors" }, make("caption", {}, caption),
      make("thead", {}, make("tr", {}, ...heads)), body);
    const region = make("div", { class: "scroll", role: "region", tabindex: "0",
      "aria-label": caption }, node);
    return make("div", {}, region, ...pager(numbers, (some) =>
      body.append(...some.map((number) => row(number, prefix)))));
  }

  function pager(items, show) {
    let shown = 0;
    const button = make("button", { type: "button" });
    const next = () => {
      show(items.slice(shown, shown + CHUNK));
      shown = Math.min(shown + CHUNK, items.length);
      const left = items.length - shown;
      button.textContent = `Show ${Math.min(left, CHUNK)} of ${left.toLocaleString("en")} more`;
      if (!left) button.remove();
    };
    button.addEventListener("click", next);
    next();
    return items.length > shown ? [button] : [];
  }

  // Children of a node of the tree by the next name in their keys.
  function split(numbers, prefix) {
    const groups = new Map();
    for (const number of numbers) {
      const rest = data.tensors[number][0].slice(prefix.length);
      const at = rest.indexOf(".");
      const name = at < 0 ? "" : rest.slice(0, at + 1);
      if (!groups.has(name)) groups.set(name, []);
      groups.get(name).push(number);
    }
    return groups;
  }

  function fill(parent, numbers, prefix) {
    const groups = split(numbers, prefix);
    const leaves = groups.get("") || [];
    groups.delete("");
    for (const [name, members] of [...groups]) {
      // A name with one tensor below it is no level of its own.
      if (members.length === 1) { leaves.push(members[0]); groups.delete(name); }
    }
    if (groups.size === 1 && !leaves.length) {
      const [[name, members]] = groups;
      return fill(parent, members, prefix + name);
    }
    const where = prefix.replace(/\.$/, "");
    if (leaves.length) {
      leaves.sort((a, b) => a - b);
      parent.append(table(leaves, `Tensors of ${where}`, prefix));
    }
    const list = make("div", {});
    parent.append(list, ...pager([...groups], (some) => {
      list.append(...some.map(([name, members]) =>
        branch(name.slice(0, -1), members, prefix + name)));
    }));
  }

  function branch(name, numbers, prefix) {
    const nbytes = numbers.reduce((sum, number) => sum + data.tensors[number][5], 0);
    const children = make("div", { class: "children" });
    const node = make("details", {}, make("summary", {}, make("span", { class: "key" }, name),
      make("span", { class: "size" }, `${counted(numbers.length, "tensor")}, ${size(nbytes)}`)),
    children);
    node.addEventListener("toggle", () => {
      if (node.open && !children.firstChild) fill(children, numbers, prefix);
    });
    return node;
  }

  function showTree() {
    const byPart = data.parts.map(() => []);
    data.tensors.forEach((tensor, number) => byPart[tensor[1]].push(number));
    tree.replaceChildren(...data.parts.map((part, i) => {
      // Keys begin with the part's name, then a dot, or a bracket of coordinates.
      const all = byPart[i].every((number) => data.tensors[number][0].startsWith(`${part}.`));
      return branch(part || "(no part)", byPart[i], all ? `${part}.` : "");
    }).filter((_, i) => byPart[i].length));
    matches.textContent = counted(data.tensors.length, "tensor");
  }

  function showMatches(words) {
    const numbers = [];
    keys.forEach((key, number) => {
      if (words.every((word) => key.includes(word))) numbers.push(number);
    });
    const total = data.tensors.length.toLocaleString("en");
    matches.textContent = `${numbers.length.toLocaleString("en")} of ${total} tensors`;
    tree.replaceChildren(...(numbers.length ? [table(numbers, "Tensors that match", "")] : []));
  }

  function update() {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) showMatches(words); else showTree();
  }

  let timer = 0;
  input.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(update, 120); });
  document.getElementById("search").addEventListener("submit", (event) => event.preventDefault());
  showTree();
})();
