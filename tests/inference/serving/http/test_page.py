"""The page at ``/``, in a real Chromium: draw, choose and drop an image, with the mouse and with the keyboard."""

import base64
import re
from pathlib import Path

import pytest
import torch

from tests.inference.conftest import Service, running_service
from tests.inference.serving.http.browser import Browser, chromium

pytestmark = pytest.mark.extended

ANSWERED = "document.querySelector('#answered-by').textContent.includes(' ms')"
ANSWER = "document.querySelector('#answer').textContent"
CLEAR = "document.querySelector('#clear').click();"
ASK = "document.querySelector('#ask-drawing').click()"
IDENTITY = "document.querySelector('#identity dd') !== null"
ROWS = "[...document.querySelectorAll('#probabilities tbody tr')].map((each) => each.innerText)"
NO_TEXT = "document.querySelector('#text-input').hidden"
PLACE = "['x', 'y', 'width'].map((each) => document.querySelector('#canvas').getBoundingClientRect()[each])"
NAMES = ("NEGATIVE", "NEUTRAL", "POSITIVE")
PREVIEW = "[document.querySelector('#preview')].map((each) => [each.naturalWidth, each.naturalHeight])[0]"

SEGMENTER = """import io
import numpy as np
from PIL import Image
from torch import nn

inputs = {"image": ("FP32", [-1, 1, 28, 28])}

def build():
    return nn.Conv2d(1, 2, 1)

def decode(data):
    return np.asarray(Image.open(io.BytesIO(data)), np.float32)[None] / 255
"""
ENCODE = """
def encode(answer):
    return {"foreground": 0.25, "box": [1, 2, 3, 4], "scores": [0, 0.5, 1] * 4}
"""


@pytest.fixture(scope="module")
def page(service, tmp_path_factory):
    """A browser with the page open."""
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        browser.open(service.url)
        browser.wait_for(IDENTITY)
        yield browser


@pytest.fixture
def browser(page):
    """Nothing was asked yet."""
    empty = "document.querySelector('#answered-by').textContent = document.querySelector('#answer').textContent = ''"
    page.evaluate(empty)
    return page


def answered(browser: Browser) -> str:
    browser.wait_for(ANSWERED)
    return str(browser.evaluate(ANSWER))


def choose(browser: Browser, model: str) -> None:
    browser.evaluate(
        f"document.querySelector('#model').value = '{model}';"
        "document.querySelector('#model').dispatchEvent(new Event('change'))"
    )


def drop_image(browser: Browser, image: Path) -> None:
    file_of(browser, image)
    drop(browser)


def drop(browser: Browser) -> None:
    """What ``given`` holds."""
    browser.evaluate(
        "document.dispatchEvent(new DragEvent('drop', {dataTransfer: given, bubbles: true, cancelable: true}))"
    )


def file_of(browser: Browser, image: Path) -> None:
    """``given``: a list of files with the image, as a person's choice or a drop makes one."""
    data = base64.b64encode(image.read_bytes()).decode()
    browser.evaluate(
        f"""(() => {{
            const bytes = Uint8Array.from(atob("{data}"), (each) => each.charCodeAt(0));
            window.given = new DataTransfer();
            given.items.add(new File([bytes], "{image.name}", {{type: "image/png"}}));
        }})()"""
    )


def truth(service: Service, image: Path) -> str:
    files = {"image": (image.name, image.read_bytes())}
    return str(service.http.post("/predict?model=m", files=files).json()["label"])


def lit(x: int, y: int) -> str:
    return f"document.querySelector('#canvas').getContext('2d').getImageData({x}, {y}, 1, 1).data[0]"


def test_it_says_which_checkpoint_answers(browser, service):
    known = service.http.get("/v2/models/m").json()["parameters"]
    shown = browser.evaluate("document.querySelector('#identity').innerText")
    assert known["digest"] in shown
    assert known["source"] in shown
    offered = browser.evaluate("[...document.querySelector('#model').options].map((each) => each.value)")
    assert offered == ["m", "two", "spare", "vit", "labels", "embed", "writer", "ours"]


def test_a_drawing_is_answered(browser):
    left, top, size = browser.evaluate(PLACE)
    browser.draw(*((left + size * 0.5, top + size * part / 10) for part in range(2, 9)))
    assert browser.evaluate(lit(140, 140)) == 255
    browser.evaluate(ASK)
    assert answered(browser).isdigit()
    assert browser.evaluate("document.querySelectorAll('#probabilities tbody tr').length") == 10
    assert browser.evaluate("document.querySelectorAll('tr.best').length") == 1


SEVEN = ((0.2, 0.2), (0.8, 0.2), (0.45, 0.9))


def drawn(browser: Browser, scale: float, right: float, down: float) -> list[str]:
    """What the page says of a seven of this size at this place."""
    browser.evaluate(CLEAR + "document.querySelector('#answered-by').textContent = ''")
    left, top, size = browser.evaluate(PLACE)
    browser.draw(*((left + size * (x * scale + right), top + size * (y * scale + down)) for x, y in SEVEN))
    browser.evaluate(ASK)
    answered(browser)
    return [str(row) for row in browser.evaluate(ROWS)]


def test_a_drawing_in_a_corner_is_answered_as_one_in_the_middle(browser):
    """The class by class probabilities are the same. Its size does not matter either."""
    middle = drawn(browser, 0.5, 0.25, 0.25)
    assert drawn(browser, 0.5, -0.0625, -0.0625) == drawn(browser, 0.5, 0.5, 0.375) == middle
    assert drawn(browser, 0.25, 0, 0.75) == drawn(browser, 1, 0, 0) == middle


def test_a_chosen_and_a_dropped_image_are_answered_as_by_the_service(browser, service, image_folder):
    image = image_folder / "007.png"
    file_of(browser, image)
    browser.evaluate(
        "document.querySelector('#file').files = given.files;"
        "document.querySelector('#file').dispatchEvent(new Event('change'))"
    )
    assert answered(browser) == truth(service, image)
    assert browser.evaluate(PREVIEW) == [28, 28]
    nothing = image_folder / "notes.txt"
    drop_image(browser, nothing)
    browser.wait_for("document.querySelector('#answered-by').textContent.includes('not an image file')")
    assert browser.evaluate(ANSWER) == "No answer"
    browser.wait_for("document.querySelector('#preview').hidden")
    image = next(each for each in sorted(image_folder.glob("*.png")) if truth(service, each) != truth(service, image))
    drop_image(browser, image)
    assert answered(browser) == truth(service, image)


def test_a_typed_text_is_answered_as_by_the_service(browser, service):
    text = "a very good film"
    expected = service.http.post("/predict?model=labels", files={"text": (None, text)}).json()
    choose(browser, "labels")
    browser.wait_for(f"!{NO_TEXT} && document.querySelector('#image-input').hidden")
    browser.evaluate("document.querySelector('#text').focus()")
    browser.send("Input.insertText", text=text)
    browser.evaluate("document.querySelector('#ask-text').click()")
    assert answered(browser) == expected["name"]
    pairs = zip(NAMES, expected["probabilities"], strict=True)
    assert [row.strip() for row in browser.evaluate(ROWS)] == [f"{name}\t{each * 100:.1f} %" for name, each in pairs]
    choose(browser, "m")
    browser.wait_for(NO_TEXT)


def test_it_works_with_the_keyboard_alone(browser):
    browser.evaluate(f"{CLEAR} document.querySelector('#canvas').focus()")
    browser.press(" ", 32)
    for _ in range(8):
        browser.press("ArrowDown", 40)
    assert browser.evaluate(lit(140, 210)) == 255
    browser.press("Enter", 13)
    assert answered(browser).isdigit()
    browser.press("Delete", 46)
    assert browser.evaluate(lit(140, 210)) == 0


def test_another_model_can_be_chosen_and_a_reload_is_seen(browser, service):
    version = int(service.http.get("/v2/models/spare").json()["versions"][-1])
    choose(browser, "spare")
    browser.wait_for("document.querySelector('#identity').innerText.includes('model.pt')")
    service.http.post("/v2/repository/models/spare/load")
    browser.wait_for(f"[...document.querySelectorAll('#identity dd')].at(-1).textContent === '{version + 1}'")


def test_there_is_a_pad_for_digits_alone_and_another_model_clears_the_answer(browser, image_folder):
    choose(browser, "m")
    browser.wait_for("!document.querySelector('#pad').hidden")
    drop_image(browser, image_folder / "007.png")
    answered(browser)
    choose(browser, "vit")
    browser.wait_for("document.querySelector('#pad').hidden")
    assert browser.evaluate(ANSWER) == "–"
    assert not browser.evaluate(ANSWERED)
    hidden = "['preview', 'mask', 'probabilities', 'outputs'].every((each) => document.getElementById(each).hidden)"
    assert browser.evaluate(hidden)
    choose(browser, "m")
    browser.wait_for("!document.querySelector('#pad').hidden")


def test_the_load_is_live(browser):
    browser.wait_for("/^[0-9.]+$/.test(document.querySelector('#rate').textContent)")
    browser.wait_for("document.querySelector('#waiting').textContent === '0'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_it_fits_and_can_be_read(browser, width, scheme, tmp_path):
    """Nothing is wider than the window, and each text has the contrast of WCAG AA against what is behind it."""
    browser.resize(width, 900, scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    browser.screenshot(tmp_path / "page.png")
    colours = browser.evaluate(
        """[...document.querySelectorAll("h1, h2, p, dt, dd, label, button, th, td, caption")].map((each) => {
            let behind = each;
            while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
            return [each.textContent, getComputedStyle(each).color, getComputedStyle(behind).backgroundColor];
        })"""
    )
    assert len(colours) > 30
    weak = [each for each in colours if contrast(each[1], each[2]) < 4.5]
    assert weak == []


def contrast(one: str, other: str) -> float:
    lights = sorted(light(colour) for colour in (one, other))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def light(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_it_asked_nobody_else_and_nothing_went_wrong(browser, service):
    """The last test of the browser."""
    browser.evaluate("1")
    asked = [
        each["params"]["request"]["url"] for each in browser.events if each["method"] == "Network.requestWillBeSent"
    ]
    assert len(asked) > 5
    assert [url for url in asked if not url.startswith((service.url, "data:", "blob:"))] == []
    assert [each for each in browser.events if each["method"] == "Runtime.exceptionThrown"] == []
    logged = [each["params"]["entry"] for each in browser.events if each["method"] == "Log.entryAdded"]
    wrong = [entry["text"] for entry in logged if entry["level"] in {"error", "warning"}]
    # The text file that was dropped is the only request that was refused. The advice is on how these tests read pixels.
    assert [text for text in wrong if "400" not in text and "willReadFrequently" not in text] == []


@pytest.fixture(scope="module")
def segmenters(tmp_path_factory):
    """A browser with the page of a service of two segmentation models: ``mask`` and, by its ``encode``, ``summary``."""
    folder = tmp_path_factory.mktemp("segmenters")
    (folder / "segmenter.py").write_text(SEGMENTER)
    (folder / "summarizer.py").write_text(SEGMENTER + ENCODE)
    # The second class where a pixel is lit.
    torch.save(
        {"weight": torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1), "bias": torch.tensor([0.5, 0])}, folder / "net.pt"
    )
    models = {"mask": "segmenter", "summary": "summarizer"}
    tables = (f'[{name}]\nurl = "net.pt"\narchitecture = "{module}:build"\n' for name, module in models.items())
    (folder / "models.toml").write_text("".join(tables).replace("net.pt", str(folder / "net.pt")))
    options = [f"--models={folder / 'models.toml'}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        with running_service(folder, None, *options) as service, chromium(folder / "chromium") as browser:
            browser.open(service.url)
            browser.wait_for(IDENTITY)
            yield browser


def test_a_mask_is_drawn_over_the_image(segmenters, image_folder, digits):
    browser, lit_pixels = segmenters, digits.pixels[7] > 127
    assert browser.evaluate("document.querySelector('#pad').hidden")
    drop_image(browser, image_folder / "007.png")
    assert answered(browser) == "output: a mask of 28 × 28 pixels"
    share = lit_pixels.float().mean().item()
    assert [row.strip() for row in browser.evaluate(ROWS)] == [
        f"0\t{(1 - share) * 100:.1f} %",
        f"1\t{share * 100:.1f} %",
    ]
    drawn = "[...document.querySelector('#mask').getContext('2d').getImageData(0, 0, 28, 28).data]"
    pixels = torch.tensor(browser.evaluate(drawn)).reshape(28, 28, 4)[..., :3]
    is_grey = (pixels == pixels[..., :1]).all(-1)
    assert torch.equal(~is_grey, lit_pixels)


def test_other_outputs_are_a_table(segmenters, image_folder):
    browser = segmenters
    choose(browser, "summary")
    drop_image(browser, image_folder / "007.png")
    assert answered(browser) == "3 outputs"
    rows = browser.evaluate("[...document.querySelectorAll('#outputs tbody tr')].map((each) => each.innerText)")
    assert rows == ["foreground\t0.25", "box\t1, 2, 3, 4", "scores\t12 numbers, from 0 to 1"]
    assert browser.evaluate("document.querySelector('#mask').hidden")
