"use strict";
// Draws the attention that the data element holds. One scene, two painters: a canvas (screen, PNG) and SVG.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const canvas = $("canvas"), stage = $("stage"), tip = $("tip");
  const FONT = 'system-ui, "Noto Sans", "Noto Sans CJK SC", "Noto Color Emoji", sans-serif';
  const MODES = ["grid", "matrix", "lines"];
  const LONGEST_SIDE = 8192; // what every browser can still hold as a canvas
  // Among so many tokens a weight that matters is a small one, and would be paper on paper.
  const isLong = () => data.views.some((v) => Math.max(v.queries.length, v.keys.length) > 128);
  const state = { view: 0, layer: 0, head: 0, mode: "matrix", zoom: 1, faint: isLong(), cursor: null };
  const cache = new Map();
  let hit = () => null, drawing = 0, moved = null;

  // ---- numbers -------------------------------------------------------------------------------------------------
  const view = () => data.views[state.view];
  const numHeads = (v = view(), layer = state.layer) => v.heads[layer];
  const value = new Float32Array(256).map((_, code) => (code / 255) ** 2);

  async function codes(viewIndex, layer) {
    const key = `${viewIndex}/${layer}`;
    if (!cache.has(key)) {
      cache.set(key, (async () => {
        const text = atob(data.views[viewIndex].layers[layer]);
        const packed = Uint8Array.from(text, (char) => char.charCodeAt(0));
        const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
        return new Uint8Array(await new Response(stream).arrayBuffer());
      })());
    }
    return cache.get(key);
  }

  // Weights of a head, or of the mean of all heads (head -1): numbers, how many rows and columns, the largest.
  async function weights(viewIndex, layer, head) {
    const v = data.views[viewIndex], rows = v.queries.length, columns = v.keys.length, size = rows * columns;
    const all = await codes(viewIndex, layer), found = new Float32Array(size), heads = v.heads[layer];
    if (head >= 0) {
      for (let i = 0; i < size; i++) found[i] = value[all[head * size + i]];
    } else {
      for (let h = 0; h < heads; h++) for (let i = 0; i < size; i++) found[i] += value[all[h * size + i]] / heads;
    }
    let largest = 0;
    for (let i = 0; i < size; i++) if (found[i] > largest) largest = found[i];
    return { at: found, rows, columns, largest };
  }

  function figures(v, layer, head) {
    const heads = v.figures[layer];
    if (head >= 0) return heads[head];
    return [0, 1].map((place) => {
      const known = heads.map((one) => one[place]).filter((one) => one !== null);
      return known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
    });
  }

  // ---- colours ---------------------------------------------------------------------------------------------------
  const RAMPS = {
    light: [[255, 255, 255], [214, 228, 244], [136, 180, 224], [51, 117, 187], [13, 52, 104]],
    dark: [[25, 31, 40], [29, 58, 94], [44, 108, 178], [124, 180, 240], [241, 248, 255]],
  };
  const COLOURS = {
    light: { paper: "#ffffff", ink: "#1f2933", muted: "#5f6c7b", line: "#cbd2d9", accent: "#d9622b", link: [37, 99, 168] },
    dark: { paper: "#12161c", ink: "#e6ebf1", muted: "#9fabb8", line: "#3a4552", accent: "#ff9b62", link: [127, 180, 238] },
  };
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const theme = () => document.documentElement.dataset.theme;
  const colours = () => COLOURS[theme()];
  let ramp = [];

  function setTheme(name) {
    document.documentElement.dataset.theme = name;
    const stops = RAMPS[name];
    ramp = Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(place), stops.length - 2);
      return stops[low].map((part, axis) => Math.round(part + (stops[low + 1][axis] - part) * (place - low)));
    });
  }

  function shade(weight, largest) {
    const share = largest > 0 ? Math.min(1, weight / largest) : 0;
    return Math.round(255 * (state.faint ? Math.sqrt(share) : share));
  }

  // ---- words -----------------------------------------------------------------------------------------------------
  const segmenter = typeof Intl !== "undefined" && Intl.Segmenter ? new Intl.Segmenter() : null;
  const signs = (text) => (segmenter ? Array.from(segmenter.segment(text), (part) => part.segment) : Array.from(text));
  function short(text, most = 16) {
    if (text.length <= most) return text;
    const parts = signs(text);
    return parts.length <= most ? text : parts.slice(0, most - 1).join("") + "…";
  }
  const isolated = (text) => `\u2068${text}\u2069`; // what runs from right to left turns nothing around it
  const measuring = document.createElement("canvas").getContext("2d");
  function widest(texts, size) {
    measuring.font = `${size}px ${FONT}`;
    return texts.reduce((most, text) => Math.max(most, measuring.measureText(text).width), 0);
  }
  const shown = (number) => (number === null ? "–" : number.toFixed(number < 10 ? 2 : 1));

  // ---- painters --------------------------------------------------------------------------------------------------
  function imageOf(cells) {
    const image = document.createElement("canvas");
    image.width = cells.columns;
    image.height = cells.rows;
    const context = image.getContext("2d"), pixels = context.createImageData(cells.columns, cells.rows);
    for (let i = 0; i < cells.at.length; i++) {
      const [red, green, blue] = ramp[shade(cells.at[i], cells.largest)];
      pixels.data.set([red, green, blue, 255], 4 * i);
    }
    context.putImageData(pixels, 0, 0);
    return image;
  }

  function canvasPainter(target, width, height, scale) {
    const ratio = Math.min(scale, LONGEST_SIDE / width, LONGEST_SIDE / height);
    target.width = Math.ceil(width * ratio);
    target.height = Math.ceil(height * ratio);
    const context = target.getContext("2d");
    context.scale(ratio, ratio);
    context.fillStyle = colours().paper;
    context.fillRect(0, 0, width, height);
    return {
      rect(x, y, w, h, fill) { context.fillStyle = fill; context.fillRect(x, y, w, h); },
      frame(x, y, w, h, stroke, thick = 1) {
        context.strokeStyle = stroke;
        context.lineWidth = thick;
        context.strokeRect(x, y, w, h);
      },
      line(x1, y1, x2, y2, stroke, thick = 1, alpha = 1) {
        context.globalAlpha = alpha;
        context.strokeStyle = stroke;
        context.lineWidth = thick;
        context.beginPath();
        context.moveTo(x1, y1);
        context.lineTo(x2, y2);
        context.stroke();
        context.globalAlpha = 1;
      },
      text(text, x, y, { size = 12, anchor = "start", turn = 0, fill = colours().ink, bold = false } = {}) {
        context.save();
        context.translate(x, y);
        context.rotate((turn * Math.PI) / 180);
        context.font = `${bold ? "600 " : ""}${size}px ${FONT}`;
        context.fillStyle = fill;
        context.direction = "ltr";
        context.textAlign = { start: "left", middle: "center", end: "right" }[anchor];
        context.textBaseline = "middle";
        context.fillText(isolated(text), 0, 0);
        context.restore();
      },
      cells(x, y, w, h, cells) {
        // Cells smaller than a point are averaged, larger ones keep their edges.
        context.imageSmoothingEnabled = w * ratio < cells.columns || h * ratio < cells.rows;
        context.imageSmoothingQuality = "high";
        context.drawImage(imageOf(cells), x, y, w, h);
      },
    };
  }

  function svgPainter(width, height) {
    const parts = [];
    const escape = (text) => text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
    const n = (number) => Number(number.toFixed(2));
    return {
      rect(x, y, w, h, fill) { parts.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" fill="${fill}"/>`); },
      frame(x, y, w, h, stroke, thick = 1) {
        parts.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" fill="none" stroke="${stroke}" stroke-width="${thick}"/>`);
      },
      line(x1, y1, x2, y2, stroke, thick = 1, alpha = 1) {
        parts.push(`<line x1="${n(x1)}" y1="${n(y1)}" x2="${n(x2)}" y2="${n(y2)}" stroke="${stroke}" stroke-width="${n(thick)}" stroke-opacity="${n(alpha)}"/>`);
      },
      text(text, x, y, { size = 12, anchor = "start", turn = 0, fill = colours().ink, bold = false } = {}) {
        const turned = turn ? ` transform="rotate(${turn} ${n(x)} ${n(y)})"` : "";
        parts.push(`<text x="${n(x)}" y="${n(y)}" font-size="${n(size)}" text-anchor="${anchor}" dominant-baseline="central" fill="${fill}"${bold ? ' font-weight="600"' : ""}${turned}>${escape(isolated(text))}</text>`);
      },
      cells(x, y, w, h, cells) {
        if (cells.rows * cells.columns > 4096 || w < 150) {
          parts.push(`<image x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" preserveAspectRatio="none" style="image-rendering: pixelated" href="${imageOf(cells).toDataURL("image/png")}"/>`);
          return;
        }
        const cw = w / cells.columns, ch = h / cells.rows;
        for (let i = 0; i < cells.at.length; i++) {
          const fill = `rgb(${ramp[shade(cells.at[i], cells.largest)].join(" ")})`;
          this.rect(x + (i % cells.columns) * cw, y + Math.floor(i / cells.columns) * ch, cw, ch, fill);
        }
      },
      done() {
        return `<svg xmlns="http://www.w3.org/2000/svg" width="${n(width)}" height="${n(height)}" viewBox="0 0 ${n(width)} ${n(height)}" font-family="${escape(FONT)}">` +
          `<rect width="100%" height="100%" fill="${colours().paper}"/>${parts.join("")}</svg>\n`;
      },
    };
  }

  // ---- scenes: each knows its size, paints itself, and says what is at a point --------------------------------------
  async function gridScene(width) {
    const v = view(), rows = v.queries.length, columns = v.keys.length, most = Math.max(...v.heads);
    const left = 62, top = 24, gap = 10, caption = 16;
    const w = Math.max(44, Math.min(190, (width - left) / most - gap)) * state.zoom;
    const h = w * Math.min(1.6, Math.max(0.5, rows / columns));
    const all = [];
    for (let layer = 0; layer < v.layers.length; layer++) {
      await codes(state.view, layer); // one after the other: the first is there at once
      for (let head = 0; head < v.heads[layer]; head++) {
        all.push({ layer, head, x: left + head * (w + gap), y: top + layer * (h + caption + gap), cells: await weights(state.view, layer, head) });
      }
    }
    return {
      width: left + most * (w + gap), height: top + v.layers.length * (h + caption + gap),
      paint(painter) {
        const ink = colours();
        for (let head = 0; head < most; head++) painter.text(`head ${head + 1}`, left + head * (w + gap) + w / 2, 12, { anchor: "middle", size: 12, fill: ink.muted });
        v.layers.forEach((_, layer) => painter.text(`layer ${layer + 1}`, left - 10, top + layer * (h + caption + gap) + h / 2, { anchor: "end", size: 12, fill: ink.muted }));
        for (const one of all) {
          painter.cells(one.x, one.y, w, h, one.cells);
          if (v.memory) painter.line(one.x + (w * v.memory) / columns, one.y, one.x + (w * v.memory) / columns, one.y + h, ink.accent, 1);
          const marked = one.layer === state.layer && one.head === state.head;
          painter.frame(one.x, one.y, w, h, marked ? ink.accent : ink.line, marked ? 2.5 : 1);
          const [entropy, distance] = figures(v, one.layer, one.head);
          const said = w < 74 ? `${shown(entropy)}` : distance === null ? `${shown(entropy)} bits` : `${shown(entropy)} bits, ${shown(distance)} away`;
          painter.text(said, one.x + w / 2, one.y + h + 9, { anchor: "middle", size: w < 110 ? 9.5 : 11, fill: ink.muted });
        }
      },
      at(x, y) {
        const one = all.find((o) => x >= o.x && x < o.x + w && y >= o.y && y < o.y + h);
        return one ? { layer: one.layer, head: one.head, says: () => `layer ${one.layer + 1}, head ${one.head + 1}\n${describe(v, one.layer, one.head)}` } : null;
      },
    };
  }

  // Cells need not be square: the matrix takes the whole width, and as much of the height as names stay readable in.
  async function matrixScene(width, height) {
    const v = view(), cells = await weights(state.view, state.layer, state.head);
    const { rows, columns } = cells;
    const buckets = bucketsOf(v), strip = buckets ? 7 : 0;
    const beside = buckets ? buckets.length * strip + 5 : 0; // a column of colours a round
    const most = width < 600 ? 9 : 16; // signs of a name
    const names = { q: v.queries.map((t) => short(t, most)), k: v.keys.map((t) => short(t, most)) };
    const largest = LONGEST_SIDE / 1.2;
    const left = widest(names.q, 13) + 12 + beside;
    const across = Math.min(Math.max(1.2, (width - left - 6) / columns) * state.zoom, largest / columns);
    // All names of the keys stand in one direction: level if every one fits, otherwise upright.
    const level = widest(names.k, 13) + 6 <= across;
    const keySize = Math.max(9, Math.min(13, level ? 13 : across * 0.8));
    const top = 24 + (level ? 20 : widest(names.k, keySize) + 8);
    const room = Math.max(240, height) - top - 8;
    const down = Math.min(Math.max(room / rows, Math.min(14, across / state.zoom)), 64, largest / rows / state.zoom) * state.zoom;
    const querySize = Math.max(9, Math.min(13, down * 0.8));
    const steps = { q: Math.max(1, Math.ceil((querySize * 1.15) / down)), k: Math.max(1, level ? 1 : Math.ceil((keySize * 1.15) / across)) };
    const w = across * columns, h = down * rows, long = 96, bar = Math.max(left + 110, left + w - long - 42);
    return {
      width: Math.max(left + w, bar + long + 42) + 6, height: top + h + 8,
      paint(painter) {
        const ink = colours();
        painter.text("query ↓   key →", 4, 10, { size: 11, fill: ink.muted });
        if (v.memory) {
          painter.rect(left, top - 4, v.memory * across, 3, ink.accent);
        }
        names.k.forEach((name, column) => {
          if (column % steps.k) return;
          const x = left + (column + 0.5) * across, fill = column < v.memory ? ink.muted : ink.ink;
          if (level) painter.text(name, x, top - 13, { size: keySize, anchor: "middle", fill });
          else painter.text(name, x, top - 7, { size: keySize, turn: -90, fill });
        });
        names.q.forEach((name, row) => { if (row % steps.q === 0) painter.text(name, left - 7 - beside, top + (row + 0.5) * down, { size: querySize, anchor: "end" }); });
        (buckets || []).forEach((round, number) => round.slice(-rows).forEach((bucket, row) => {
          painter.rect(left - beside + number * strip, top + row * down, strip - 0.5, down, bucketColour(bucket));
        }));
        painter.cells(left, top, w, h, cells);
        painter.frame(left, top, w, h, ink.line);
        if (v.memory) {
          painter.line(left + v.memory * across, top - 4, left + v.memory * across, top + h, ink.accent, 1.5);
          painter.text("memory", Math.max(left + 2, 96), 10, { size: 11, fill: ink.accent });
        }
        if (state.cursor) painter.frame(left + state.cursor.column * across, top + state.cursor.row * down, across, down, ink.accent, 2.5);
        const slices = 40;
        for (let i = 0; i < slices; i++) painter.rect(bar + (i * long) / slices, 5, long / slices + 0.5, 10, `rgb(${ramp[shade((i + 0.5) / slices, 1)].join(" ")})`);
        painter.frame(bar, 5, long, 10, ink.line);
        painter.text("0", bar - 5, 10, { size: 10.5, anchor: "end", fill: ink.muted });
        painter.text(cells.largest.toFixed(3), bar + long + 5, 10, { size: 10.5, fill: ink.muted });
      },
      at(x, y) {
        const column = Math.floor((x - left) / across), row = Math.floor((y - top) / down);
        return row >= 0 && row < rows && column >= 0 && column < columns ? cellAt(v, cells, row, column) : null;
      },
      cell: (row, column) => cellAt(v, cells, row, column),
      place: (row, column) => [left + (column + 0.5) * across, top + (row + 0.5) * down],
      rows, columns,
    };
  }

  // Hashed layers: the bucket of each token in each round of the head.
  const bucketsOf = (v) => (v.buckets[state.layer] && state.head >= 0 ? v.buckets[state.layer][state.head] : null);
  const bucketColour = (bucket) => `hsl(${(bucket * 137.5) % 360} 55% ${theme() === "dark" ? 58 : 62}%)`;
  function met(v, query, key) {
    const rounds = bucketsOf(v);
    if (!rounds) return "";
    const each = rounds.map((round, number) => `round ${number + 1}: ${round[query]} and ${round[key]}${round[query] === round[key] ? ", the same" : ""}`);
    return `\nbuckets, ${each.join("; ")}`;
  }

  const place = (v, axis, index) => (v.block[axis] === 1 ? `${index + 1}` : `${index * v.block[axis] + 1}…`);
  function cellAt(v, cells, row, column) {
    const memory = column < v.memory ? " (memory)" : "";
    const says = () => `${isolated(v.queries[row])} (${place(v, 0, row)}) → ${isolated(v.keys[column])} (${place(v, 1, column)})${memory}\n` +
      `weight ${cells.at[row * cells.columns + column].toFixed(3)}${met(v, row + v.memory, column)}`;
    return { row, column, says };
  }

  async function linesScene(width) {
    const v = view(), cells = await weights(state.view, state.layer, state.head);
    const { rows, columns } = cells, most = Math.max(rows, columns);
    const row = Math.max(4, Math.min(24, 900 / most)) * state.zoom;
    const size = Math.max(9, Math.min(14, row * 0.72)), step = Math.max(1, Math.ceil((size * 1.15) / row));
    const names = { q: v.queries.map((t) => short(t, 24)), k: v.keys.map((t) => short(t, 24)) };
    const left = Math.max(widest(names.q, size), widest(["query"], 11)) + 14, right = widest(names.k, size) + 14;
    const between = Math.max(160, Math.min(460, width - left - right - 30));
    const x1 = left, x2 = left + between, top = 30;
    // The first query stands beside the column that is its own.
    const y1 = (i) => top + (i + v.memory + 0.5) * row, y2 = (j) => top + (j + 0.5) * row;
    const chosen = () => (moved && moved.side ? moved : state.cursor ? { side: "q", index: state.cursor.row } : null);
    const summary = (side, index) => {
      const others = side === "q" ? columns : rows;
      const found = Array.from({ length: others }, (_, i) => [side === "q" ? cells.at[index * columns + i] : cells.at[i * columns + index], i]);
      found.sort((a, b) => b[0] - a[0]);
      const lines = found.slice(0, 6).filter(([weight]) => weight > 0).map(([weight, i]) => `${weight.toFixed(3)}  ${isolated((side === "q" ? v.keys : v.queries)[i])} (${place(v, side === "q" ? 1 : 0, i)})`);
      const name = side === "q" ? v.queries[index] : v.keys[index];
      return `${isolated(name)} (${place(v, side === "q" ? 0 : 1, index)}) ${side === "q" ? "looks at" : "is looked at by"}\n${lines.join("\n") || "nothing"}`;
    };
    return {
      width: x2 + right + 10, height: top + Math.max(rows + v.memory, columns) * row + 8,
      paint(painter) {
        const ink = colours(), pick = chosen(), link = `rgb(${ink.link.join(" ")})`;
        painter.text("query", x1 - 8, 11, { size: 11, anchor: "end", fill: ink.muted });
        painter.text("key", x2 + 8, 11, { size: 11, fill: ink.muted });
        if (v.memory) {
          painter.line(x2 + 3, top, x2 + 3, top + v.memory * row, ink.accent, 3);
          painter.text("memory", x2 - 6, 11, { size: 11, anchor: "end", fill: ink.accent });
        }
        for (let i = 0; i < rows; i++) {
          for (let j = 0; j < columns; j++) {
            const weight = cells.at[i * columns + j];
            const mine = pick && (pick.side === "q" ? pick.index === i : pick.index === j);
            if (weight < (mine ? 0.002 : 0.02) || (pick && !mine)) continue;
            const strength = state.faint ? Math.sqrt(weight) : weight ** 0.8;
            painter.line(x1, y1(i), x2, y2(j), mine ? ink.accent : link, 0.6 + 2.2 * strength, Math.min(1, 0.06 + 0.94 * strength));
          }
        }
        names.q.forEach((name, i) => {
          const mine = pick && pick.side === "q" && pick.index === i;
          if (i % step === 0 || mine) painter.text(name, x1 - 8, y1(i), { size, anchor: "end", bold: mine, fill: mine ? ink.accent : ink.ink });
        });
        names.k.forEach((name, j) => {
          const mine = pick && pick.side === "k" && pick.index === j;
          if (j % step === 0 || mine) painter.text(name, x2 + 8, y2(j), { size, bold: mine, fill: mine ? ink.accent : j < v.memory ? ink.muted : ink.ink });
        });
      },
      at(x, y) {
        const side = x < (x1 + x2) / 2 ? "q" : "k";
        const index = Math.floor((y - top) / row) - (side === "q" ? v.memory : 0);
        return index >= 0 && index < (side === "q" ? rows : columns) ? { side, index, says: () => summary(side, index) } : null;
      },
      cell: (i) => ({ says: () => summary("q", i) }),
      place: (i) => [x1, y1(i)],
      rows, columns: 1,
    };
  }

  const SCENES = { grid: gridScene, matrix: matrixScene, lines: linesScene };
  let scene = null;

  // ---- screen ----------------------------------------------------------------------------------------------------
  function describe(v, layer, head) {
    const [entropy, distance] = figures(v, layer, head);
    const said = [`entropy ${shown(entropy)} bits`];
    if (distance !== null) said.push(`mean distance ${shown(distance)} tokens`);
    return said.join(" · ");
  }

  function status() {
    const v = view(), said = [v.name, `layer ${state.layer + 1} of ${v.layers.length}`];
    said.push(state.head < 0 ? `mean of ${numHeads()} heads` : `head ${state.head + 1} of ${numHeads()}`, describe(v, state.layer, state.head));
    said.push(`${v.queries.length} × ${v.keys.length}${v.memory ? `, ${v.memory} of memory` : ""}`);
    if (v.block[0] > 1 || v.block[1] > 1) said.push(`a cell is ${v.block[0]} × ${v.block[1]} tokens: mean of queries, sum of keys`);
    return said.join(" · ");
  }

  // One sentence: where most of the weight of a head lies.
  async function sentence() {
    const v = view(), cells = await weights(state.view, state.layer, state.head), { at, rows, columns } = cells;
    const percent = (share) => `${Math.round(100 * share)}%`;
    const mean = (of) => {
      let sum = 0, count = 0;
      for (let i = 0; i < rows; i++) {
        const j = of(i);
        if (j >= 0 && j < columns) { sum += at[i * columns + j]; count++; }
      }
      return count ? sum / count : 0;
    };
    const isSelf = figures(v, state.layer, Math.max(0, state.head))[1] !== null, whole = v.block[0] === 1 && v.block[1] === 1;
    const who = state.head < 0 ? `The heads of layer ${state.layer + 1} together` : `Head ${state.head + 1} of layer ${state.layer + 1}`;
    const looks = state.head < 0 ? "look" : "looks";
    if (isSelf && whole && rows > 2) {
      const offsets = [[-1, "the token before"], [0, "the token itself"], [1, "the token after"], [-2, "two tokens back"], [2, "two tokens ahead"]];
      const found = offsets.map(([offset, words]) => [mean((i) => i + v.memory + offset), words]).sort((a, b) => b[0] - a[0]);
      if (found[0][0] >= 0.35) return `${who} ${looks} mostly at ${found[0][1]}: ${percent(found[0][0])} of the weight.`;
      const near = Math.min(1, found.reduce((sum, one) => sum + one[0], 0));
      if (near >= 0.6) return `${who} ${looks} mostly at the nearest tokens: ${percent(near)} of the weight is at most two tokens away.`;
    }
    const shares = Array.from({ length: columns }, (_, j) => mean(() => j));
    const best = shares.indexOf(Math.max(...shares)), key = `${isolated(v.keys[best])} (${place(v, 1, best)})`;
    if (shares[best] >= 0.35 && columns > 1) return `${who} ${looks} mostly at ${key}: ${percent(shares[best])} of the weight.`;
    const top = at.indexOf(cells.largest), row = Math.floor(top / columns), column = top % columns;
    const pair = `the strongest pair is ${isolated(v.queries[row])} → ${isolated(v.keys[column])} with ${percent(cells.largest)}`;
    return `${who} ${looks} at several tokens: the most, ${percent(shares[best])} of the weight, is on ${key}; ${pair}.`;
  }

  function buttons(parent, names, chosen, choose) {
    parent.replaceChildren(...names.map((name, index) => {
      const button = document.createElement("button");
      button.textContent = name;
      button.dataset.name = name;
      button.setAttribute("aria-pressed", String(index === chosen));
      button.addEventListener("click", () => choose(index));
      return button;
    }));
  }

  function options(select, names, chosen, first) {
    select.replaceChildren(...names.map((name, index) => {
      const option = document.createElement("option");
      option.value = String(index + first);
      option.textContent = name;
      option.selected = index + first === chosen;
      return option;
    }));
  }

  function controls() {
    const v = view();
    state.layer = Math.max(0, Math.min(state.layer, v.layers.length - 1));
    state.head = Math.max(-1, Math.min(state.head, numHeads() - 1));
    buttons($("views"), data.views.map((one) => one.name), state.view, (index) => change({ view: index, cursor: null }));
    buttons($("modes"), MODES, MODES.indexOf(state.mode), (index) => change({ mode: MODES[index], cursor: null }));
    options($("layer"), v.layers.map((_, index) => `${index + 1}`), state.layer, 0);
    options($("head"), ["mean", ...Array.from({ length: numHeads() }, (_, index) => `${index + 1}`)], state.head, -1);
    $("contrast").setAttribute("aria-pressed", String(state.faint));
    $("status").textContent = status();
  }

  function paint() {
    const scale = Math.max(1, window.devicePixelRatio || 1);
    canvas.style.width = `${scene.width}px`;
    canvas.style.height = `${scene.height}px`;
    scene.paint(canvasPainter(canvas, scene.width, scene.height, scale));
  }

  async function draw() {
    const mine = ++drawing;
    controls();
    const said = await sentence();
    if (mine !== drawing) return;
    $("sentence").textContent = said; // before the room for the picture is measured
    const made = await SCENES[state.mode](Math.max(320, stage.clientWidth - 12), Math.max(300, window.innerHeight - stage.offsetTop - 22));
    if (mine !== drawing) return; // another picture was asked for meanwhile
    scene = made;
    hit = made.at;
    moved = null;
    paint();
    if (state.cursor && scene.cell) {
      $("status").textContent = scene.cell(state.cursor.row, state.cursor.column).says().replaceAll("\n", " · ");
    }
    document.body.dataset.drawn = String(drawing);
    document.body.dataset.opened ??= String(Math.round(performance.now())); // milliseconds until there was a picture
  }

  function change(values) {
    Object.assign(state, values);
    hideTip();
    return draw();
  }

  function hideTip() { tip.hidden = true; }

  canvas.addEventListener("mousemove", (event) => {
    const box = canvas.getBoundingClientRect(), found = hit(event.clientX - box.left, event.clientY - box.top);
    const before = moved;
    moved = found;
    if (scene && state.mode === "lines" && (before?.side !== found?.side || before?.index !== found?.index)) paint();
    canvas.style.cursor = found && state.mode === "grid" ? "pointer" : "default";
    if (!found) return hideTip();
    tip.textContent = found.says();
    tip.hidden = false;
    tip.style.left = `${Math.max(0, Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(0, Math.min(event.clientY + 16, window.innerHeight - tip.offsetHeight - 8))}px`;
  });
  canvas.addEventListener("mouseleave", () => {
    hideTip();
    const before = moved;
    moved = null;
    if (scene && before?.side) paint();
  });
  canvas.addEventListener("click", (event) => {
    const box = canvas.getBoundingClientRect(), found = hit(event.clientX - box.left, event.clientY - box.top);
    if (!found) return;
    if (state.mode === "grid") change({ layer: found.layer, head: found.head, mode: "matrix" });
    else if (state.mode === "matrix") change({ cursor: { row: found.row, column: found.column } });
    else change({ cursor: found.side === "q" ? { row: found.index, column: 0 } : null });
  });

  function save(blob, kind) {
    const link = document.createElement("a");
    const head = state.mode === "grid" ? "" : `-layer-${state.layer + 1}-${state.head < 0 ? "mean" : `head-${state.head + 1}`}`;
    link.download = `attention-${view().name.replace(/[^\w-]+/g, "-")}${head}-${state.mode}.${kind}`;
    link.href = URL.createObjectURL(blob);
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }
  function savePng() {
    const target = document.createElement("canvas");
    scene.paint(canvasPainter(target, scene.width, scene.height, 2));
    target.toBlob((blob) => save(blob, "png"), "image/png");
  }
  function saveSvg() {
    const painter = svgPainter(scene.width, scene.height);
    scene.paint(painter);
    save(new Blob([painter.done()], { type: "image/svg+xml" }), "svg");
  }

  const wrap = (number, first, count) => first + ((((number - first) % count) + count) % count);
  function walk(down, across) {
    if (!scene || !scene.cell) return;
    const from = state.cursor || { row: -Math.max(0, down), column: -Math.max(0, across) };
    const cursor = { row: wrap(from.row + down, 0, scene.rows), column: wrap(from.column + across, 0, scene.columns) };
    change({ cursor }).then(() => {
      const [x, y] = scene.place(cursor.row, cursor.column);
      if (x < stage.scrollLeft || x > stage.scrollLeft + stage.clientWidth) stage.scrollLeft = x - stage.clientWidth / 2;
      if (y < stage.scrollTop || y > stage.scrollTop + stage.clientHeight) stage.scrollTop = y - stage.clientHeight / 2;
    });
  }
  function toggleHelp() {
    $("help").hidden = !$("help").hidden;
    $("keys").setAttribute("aria-expanded", String(!$("help").hidden));
  }
  const actions = {
    g: () => change({ mode: "grid", cursor: null }), m: () => change({ mode: "matrix", cursor: null }), l: () => change({ mode: "lines", cursor: null }),
    v: () => change({ view: (state.view + 1) % data.views.length, cursor: null }),
    c: () => change({ faint: !state.faint }), t: () => { setTheme(theme() === "dark" ? "light" : "dark"); draw(); },
    p: savePng, s: saveSvg, "?": toggleHelp,
    "+": () => change({ zoom: Math.min(8, state.zoom * 1.25) }), "-": () => change({ zoom: Math.max(0.4, state.zoom / 1.25) }),
    Escape: () => { if (!$("help").hidden) toggleHelp(); change({ cursor: null }); },
    Enter: () => { if (state.mode === "grid") change({ mode: "matrix" }); },
  };
  actions["="] = actions["+"];
  // In the grid there is no mean to step on.
  const first = () => (state.mode === "grid" ? 0 : -1);
  const steps = {
    ArrowLeft: () => change({ head: wrap(state.head - 1, first(), numHeads() - first()) }), ArrowRight: () => change({ head: wrap(state.head + 1, first(), numHeads() - first()) }),
    ArrowUp: () => change({ layer: wrap(state.layer - 1, 0, view().layers.length) }), ArrowDown: () => change({ layer: wrap(state.layer + 1, 0, view().layers.length) }),
  };
  const walks = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target instanceof HTMLSelectElement) return;
    if (event.key === "Enter" && event.target instanceof HTMLButtonElement) return;
    const action = event.shiftKey && walks[event.key] ? () => walk(...walks[event.key]) : steps[event.key] || actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });

  $("layer").addEventListener("change", (event) => change({ layer: Number(event.target.value) }));
  $("head").addEventListener("change", (event) => {
    const head = Number(event.target.value);
    change(state.mode === "grid" ? { head, mode: "matrix" } : { head });
  });
  for (const [id, key] of [["png", "p"], ["svg", "s"], ["theme", "t"], ["contrast", "c"], ["larger", "+"], ["smaller", "-"], ["keys", "?"]]) {
    $(id).addEventListener("click", actions[key]);
  }
  prefersDark.addEventListener("change", (event) => { setTheme(event.matches ? "dark" : "light"); draw(); });
  let resizing = 0;
  window.addEventListener("resize", () => { clearTimeout(resizing); resizing = setTimeout(draw, 80); });

  $("title").textContent = data.title;
  $("note").textContent = data.note;
  setTheme(prefersDark.matches ? "dark" : "light");
  draw();
})();
