"""The panel in a real JupyterLab, driven by a headless Chromium: knobs, pictures, Stop, hostile prompts."""

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
    """Notebook 03 with one prompt and two scales, as somebody would type them into its parameters cell."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    small = ["prompts = ['an owl']", "guidance_scales = [1.0, 2.0]", "num_inference_steps = 2", f"study_dir = {str(folder / 'study')!r}"]
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


@pytest.fixture
def page(tmp_path):
    """Notebook 03, run from top to bottom in a browser; what the page itself raises fails the test."""
    need(CHROMIUM, "chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        need(False, "playwright")
    errors = []
    with jupyterlab(tmp_path) as address, sync_playwright() as playwright:
        profile = str(tmp_path / "chromium")
        browser = playwright.chromium.launch_persistent_context(profile, executable_path=CHROMIUM, headless=True, args=FLAGS)
        browser.set_default_timeout(PATIENCE_MS)
        page = browser.pages[0]
        page.set_viewport_size({"width": 1280, "height": 1000})
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector(".jp-NotebookPanel .jp-CodeCell")
        page.evaluate(READY)
        page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        yield page
        if os.environ.get("SDLAB_SCREENSHOTS"):
            page.screenshot(path=Path(os.environ["SDLAB_SCREENSHOTS"]) / "panel.png")
        browser.close()
    assert errors == []


def test_knobs_draw_again_stop_stops_and_hostile_prompts_stay_text(page):
    from playwright.sync_api import expect

    expect.set_options(timeout=PATIENCE_MS)
    panel = page.locator(".jp-OutputArea-output", has=page.get_by_role("button", name="Draw"))
    picture, guidance, steps = panel.locator("img.widget-image"), panel.locator(".noUi-handle").nth(0), panel.locator(".noUi-handle").nth(1)
    expect(panel.get_by_text("an owl\u201d: guidance 2, dpmpp_2m, 2 steps")).to_be_visible()
    panel.scroll_into_view_if_needed()
    first = picture.screenshot()

    guidance.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(panel.get_by_text("guidance 2.2,")).to_be_visible()
    page.keyboard.press("End")
    expect(panel.get_by_text("guidance 10,")).to_be_visible()
    assert picture.screenshot() != first

    steps.focus()
    page.keyboard.press("End")
    expect(panel.get_by_text("drawing: UNet evaluation")).to_be_visible()
    panel.get_by_role("button", name="Stop").click()
    expect(panel.get_by_text("stopped")).to_be_visible()
    page.keyboard.press("Tab")
    steps.focus()
    page.keyboard.press("Home")
    expect(panel.get_by_text("1 step (1 UNet evaluation)")).to_be_visible()

    prompt = panel.locator("input[type=text]").first
    prompt.fill('<img src=x onerror="window.hacked = 1">')
    prompt.press("Enter")
    expect(panel.get_by_text('\u201c<img src=x onerror="window.hacked = 1">\u201d')).to_be_visible()
    assert page.evaluate("window.hacked") is None
