"""The panel in a real JupyterLab, driven by a headless Chromium: knobs, pictures, enlarging, Stop, recall, hostile prompts."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "03_sample_guidance.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PATIENCE_MS = 180_000
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
QUIET = {"fetchNews": "false", "checkForUpdates": False}
READY = """async () => {
    const app = window.jupyterapp; await app.restored;
    let widget;
    for (let i = 0; i < 600 && !(widget && widget.sessionContext); i++) {
        widget = app.shell.currentWidget; await new Promise(done => setTimeout(done, 100));
    }
    await widget.context.ready; await widget.sessionContext.ready;
    const kernel = widget.sessionContext.session.kernel; await kernel.info;
    await kernel.requestExecute({code: 'None', silent: true}).done;
}"""


def need(there, what):
    """Skip where a person has not installed `what`; in CI it has to be there."""
    if not there:
        message = f"{what} is not installed"
        pytest.fail(message) if os.environ.get("CI") == "true" else pytest.skip(message)


def small_copy(folder):
    """Notebook 03 with one prompt, two scales and two steps, as somebody would type them into its parameters cell."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    small = ["prompts = ['an owl']", "guidance_scales = [1.0, 2.0]", "guidance_scale = 2.0", "num_inference_steps = 2"]
    small += ["axes = {'solver': ['ddim'], 'num_inference_steps': [2]}", f"study_dir = {str(folder / 'study')!r}"]
    cell.source += "\n" + "\n".join(small)
    nbformat.write(notebook, folder / "panel.ipynb")


@contextlib.contextmanager
def jupyterlab(folder):
    """A server of its own with nothing of the user's: yields the notebook's address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token, root, settings = secrets.token_hex(8), folder / "root", folder / "settings" / "@jupyterlab" / "apputils-extension"
    root.mkdir()
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(QUIET))
    small_copy(root)
    places = {"CONFIG": "config", "DATA": "data", "RUNTIME": "runtime"}
    environment = {key: value for key, value in os.environ.items() if key != "SDLAB_HEADLESS"}
    environment |= {f"JUPYTER_{key}_DIR": str(folder / name) for key, name in places.items()}
    environment |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces")}
    environment |= {"IPYTHONDIR": str(folder / "ipython"), "NO_PROXY": "127.0.0.1,localhost"}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"]
    command += ["--allow-root", f"--ServerApp.root_dir={root}", f"--IdentityProvider.token={token}", "--ServerApp.terminals_enabled=False"]
    command += ["--LabApp.extension_manager=readonly", "--expose-app-in-browser"]
    with (folder / "lab.log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_for_server(f"http://127.0.0.1:{port}/api/status?token={token}", server, folder / "lab.log")
        yield f"http://127.0.0.1:{port}/lab/tree/panel.ipynb?token={token}&reset"
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def wait_for_server(address, server, log):
    until = time.monotonic() + PATIENCE_MS / 1000
    while time.monotonic() < until:
        assert server.poll() is None, f"JupyterLab did not start: {log.read_text()[-2000:]}"
        with contextlib.suppress(OSError):
            urllib.request.urlopen(address, timeout=5).read()
            return
        time.sleep(0.2)
    pytest.fail(f"JupyterLab does not answer: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def lab(scratch):
    """Notebook 03, run from top to bottom in a browser, and what its page complained of."""
    need(CHROMIUM, "chromium")
    try:
        from playwright.sync_api import expect, sync_playwright
    except ImportError:
        need(False, "playwright")
    errors = []
    with jupyterlab(scratch) as address, sync_playwright() as playwright:
        profile = str(scratch / "chromium")
        browser = playwright.chromium.launch_persistent_context(profile, executable_path=CHROMIUM, headless=True, args=FLAGS)
        browser.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page = browser.pages[0]
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: message.type == "error" and errors.append(message.text))
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell")
        page.evaluate(READY)
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        yield page, errors
        browser.close()


@pytest.fixture
def page(lab):
    """The page, which must not have complained of anything when the test is over."""
    page, errors = lab
    yield page
    assert errors == []


@pytest.fixture
def panel(page):
    shown = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Draw", exact=True))
    expect_text(shown, "UNet evaluation")
    shown.scroll_into_view_if_needed()
    return shown


def expect_text(panel, text):
    from playwright.sync_api import expect

    expect(panel.locator(".widget-html", has_text=text).last).to_be_visible()


def slider(panel, name):
    return panel.locator(".widget-hslider", has=panel.page.get_by_text(name, exact=True)).locator(".noUi-handle")


def sources(panel):
    """The addresses of the pictures, which are others after each draw."""
    return panel.locator(".sdlab-grid img").evaluate_all("images => images.map(image => image.src)")


def shoot(page, name):
    if os.environ.get("SDLAB_SCREENSHOTS"):
        page.screenshot(path=Path(os.environ["SDLAB_SCREENSHOTS"]) / f"{name}.png")


def test_the_slider_draws_again_and_two_scales_stand_side_by_side(page, panel):
    from playwright.sync_api import expect

    expect_text(panel, "an owl\u201d: guidance 2, dpmpp_2m, 2 steps")
    grid = panel.locator(".sdlab-grid")
    expect(grid.locator("img")).to_have_count(8)
    sizes = grid.locator("img").evaluate_all("images => images.map(image => [image.width, getComputedStyle(image).imageRendering])")
    assert sizes == [[128, "pixelated"]] * 8
    shoot(page, "first")
    first, first_sources = grid.screenshot(), sources(panel)
    slider(panel, "guidance").first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect_text(panel, "guidance 2.2,")
    page.keyboard.press("End")
    expect_text(panel, "guidance 10,")
    assert grid.screenshot() != first and not set(sources(panel)) & set(first_sources)
    panel.get_by_label("compare with").check()
    expect_text(panel, "guidance 10 and 1,")
    expect(grid.locator("img")).to_have_count(16)
    assert grid.locator(".sdlab-caption").all_text_contents()[:3] == ["seed 0, guidance 10", "seed 0, guidance 1", "seed 1, guidance 10"]
    shoot(page, "compare")
    panel.get_by_label("compare with").uncheck()
    expect(grid.locator("img")).to_have_count(8)


def test_a_click_enlarges_a_picture_and_escape_or_a_click_closes_it(page, panel):
    from playwright.sync_api import expect

    dialog, third = panel.locator("dialog"), panel.get_by_role("button", name="enlarge seed 2,")
    third.click()
    expect(dialog).to_be_visible()
    expect(dialog.get_by_alt_text("seed 2, guidance")).to_be_visible()
    assert dialog.locator("img").evaluate("image => image.width") == 768
    shoot(page, "enlarged")
    page.keyboard.press("ArrowRight")
    expect(dialog.locator("p")).to_contain_text("seed 3, guidance")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(panel.get_by_role("button", name="Save PNG: seed 3,")).to_be_visible()
    third.focus()
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    dialog.click()
    expect(dialog).to_be_hidden()
    panel.get_by_role("button", name="Save PNG: seed 2,").click()
    expect_text(panel, "saved/seed2-guidance")
    panel.get_by_text("saved/seed2-guidance").scroll_into_view_if_needed()
    shoot(page, "saved")
    panel.get_by_role("button", name="unselect").click()
    expect(panel.get_by_role("button", name="Save PNG", exact=True)).to_be_visible()


def test_stop_stops_and_an_earlier_draw_comes_back(page, panel):
    from playwright.sync_api import expect

    before = sources(panel)
    slider(panel, "steps").focus()
    page.keyboard.press("End")
    expect_text(panel, "drawing: UNet evaluation")
    expect_text(panel, "s left")
    shoot(page, "drawing")
    panel.get_by_role("button", name="Stop").click()
    expect_text(panel, "stopped")
    assert sources(panel) == before
    slider(panel, "steps").focus()
    page.keyboard.press("Home")
    expect_text(panel, "1 step (1 UNet evaluation)")
    panel.get_by_label("earlier").select_option(index=1)
    expect_text(panel, "2 steps (2 UNet evaluations)")
    expect(panel.locator(".widget-hslider", has=page.get_by_text("steps", exact=True)).locator(".widget-readout")).to_have_text("2")


def test_hostile_prompts_stay_text(page, panel):
    prompt = panel.get_by_label("prompt", exact=True)
    prompt.fill('<img src=x onerror="window.hacked = 1">')
    prompt.press("Enter")
    expect_text(panel, '\u201c<img src=x onerror="window.hacked = 1">\u201d')
    assert page.evaluate("window.hacked") is None and panel.locator("img[src=x]").count() == 0
    page.evaluate("window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_selector("body[data-jp-theme-light=false]", state="attached")
    prompt.fill("an owl " * 100)
    prompt.press("Enter")
    expect_text(panel, "start and end included, and are cut")
    panel.get_by_role("button", name="Save PNG").scroll_into_view_if_needed()
    shoot(page, "dark")
