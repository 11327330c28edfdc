const LEAST = 128;
const MOST = 256;
const LARGEST = 768;

function make(tag, className, parts = {}) {
  const made = Object.assign(document.createElement(tag), { className }, parts);
  if (tag === "button") made.type = "button";
  return made;
}

/** Small pictures grow by whole factors, so that all their pixels stay squares of one size. */
function fit(img) {
  const side = Math.min(img.naturalWidth, img.naturalHeight);
  const factor = side < LEAST ? Math.ceil(LEAST / side) : Math.min(1, MOST / side);
  img.style.width = `${img.naturalWidth * factor}px`;
  img.classList.toggle("sdlab-pixels", factor > 1);
}

function fitLarge(img) {
  const [width, height] = [img.naturalWidth, img.naturalHeight];
  const room = Math.min((window.innerWidth * 0.9) / width, (window.innerHeight * 0.8) / height);
  const wanted = Math.min(room, Math.max(1, LARGEST / Math.max(width, height)));
  img.style.width = `${width * (wanted > 1 ? Math.floor(wanted) : wanted)}px`;
  img.classList.toggle("sdlab-pixels", wanted > 1);
}

function makeCell(index, select, open) {
  const cell = make("li", "sdlab-cell");
  const button = make("button", "sdlab-picture", { onclick: () => open(index) });
  const img = make("img", "", { onload: () => fit(img) });
  const unselect = make("button", "sdlab-unselect", { onclick: () => select(-1), title: "unselect", textContent: "\u2713" });
  const caption = make("span", "sdlab-caption");
  button.append(img);
  cell.append(button, unselect, caption);
  return { cell, button, img, unselect, caption };
}

function makeDialog(step) {
  const dialog = make("dialog", "sdlab-large");
  const button = make("button", "sdlab-picture", { title: "close" });
  const img = make("img", "", { onload: () => fitLarge(img) });
  const caption = make("p", "sdlab-caption");
  button.append(img);
  dialog.append(button, caption);
  dialog.onclick = () => dialog.close();
  dialog.onkeydown = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) step(by);
  };
  return { dialog, img, caption };
}

function render({ model, el }) {
  const none = make("p", "sdlab-none", { textContent: "no pictures yet" });
  const grid = make("ul", "sdlab-grid");
  const large = makeDialog((by) => move(by));
  const cells = [];
  let pictures = null;
  let addresses = [];

  const select = (index) => {
    model.set("selected", index);
    model.save_changes();
  };
  const enlarge = (index) => {
    large.img.src = addresses[index];
    large.img.alt = model.get("captions")[index] ?? "";
    large.caption.textContent = large.img.alt;
  };
  const open = (index) => {
    select(index);
    enlarge(index);
    large.dialog.showModal();
  };
  const move = (by) => {
    const index = (model.get("selected") + by + addresses.length) % addresses.length;
    select(index);
    enlarge(index);
  };
  const load = () => {
    const stale = addresses;
    pictures = model.get("pictures");
    addresses = pictures.map((png) => URL.createObjectURL(new Blob([png], { type: "image/png" })));
    while (cells.length > pictures.length) cells.pop().cell.remove();
    while (cells.length < pictures.length) {
      cells.push(makeCell(cells.length, select, open));
      grid.append(cells.at(-1).cell);
    }
    cells.forEach(({ img }, index) => (img.src = addresses[index]));
    stale.forEach((address) => URL.revokeObjectURL(address));
  };
  const update = () => {
    if (model.get("pictures") !== pictures) load();
    const [captions, selected] = [model.get("captions"), model.get("selected")];
    none.hidden = pictures.length > 0;
    grid.style.setProperty("--sdlab-columns", Math.max(1, Math.min(model.get("columns"), pictures.length)));
    cells.forEach(({ cell, button, img, unselect, caption }, index) => {
      img.alt = caption.textContent = captions[index] ?? "";
      cell.classList.toggle("sdlab-selected", index === selected);
      button.setAttribute("aria-label", `enlarge ${img.alt}`);
      unselect.setAttribute("aria-label", `unselect ${img.alt}`);
      unselect.hidden = index !== selected;
    });
    if (large.dialog.open) selected in addresses ? enlarge(selected) : large.dialog.close();
  };

  el.classList.add("sdlab-gallery");
  el.dataset.lmSuppressShortcuts = "true";
  el.append(none, grid, large.dialog);
  model.on("change", update);
  update();
  return () => {
    model.off("change", update);
    addresses.forEach((address) => URL.revokeObjectURL(address));
  };
}

export default { render };
