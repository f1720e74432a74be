"""One file or a folder: the names that follow, and what may not take the place of what."""

from contextlib import nullcontext

import pytest

from ckpt_tools.errors import DestinationExistsError
from ckpt_tools.stores.fsspec.location import FsspecOutputLocation
from ckpt_tools.stores.output_names import OutputForm
from ckpt_tools.stores.publishing import check_free
from ckpt_tools.stores.s3.client import Bucket
from ckpt_tools.stores.s3.location import S3OutputLocation
from ckpt_tools.stores.s3.options import S3Options
from ckpt_tools.stores.urls import open_output_location

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("form", "root", "digests", "url"),
    [
        (OutputForm(), "a/out.pt", "tag/ckpt-tools.digests.json", "x://a/out.pt/tag/ckpt-tools.digests.json"),
        (OutputForm("out.pt"), "a", "out.pt.digests.json", "x://a/out.pt.digests.json"),
    ],
)
def test_the_names_of_an_output(form, root, digests, url):
    path = form.digests_path("tag/ckpt-tools.digests.json")
    assert (form.root_folder_of("a/out.pt"), path, form.file_url("x://a/out.pt", path)) == (root, digests, url)


@pytest.mark.parametrize(
    ("name", "form"),
    [("out", OutputForm()), ("out.safetensors", OutputForm("out.safetensors")), ("m.pt", OutputForm("m.pt"))],
)
@pytest.mark.parametrize("where", ["", "memory://x/", "s3://bucket/x/"])
def test_the_name_decides_where_a_place_is_opened(where, name, form, tmp_path):
    place = open_output_location(f"{where or tmp_path}/{name}".replace("//out", "/out").replace("//m", "/m"))
    assert (place.form, place.name) == (form, name)
    assert place.as_single_file().form == OutputForm(name)


def test_object_stores_keep_what_is_ours_beside_a_file_and_in_a_folder():
    place = S3OutputLocation(Bucket(S3Options(), "bucket"), "a/out")
    assert place.stage().lock.key == "a/out/.ckpt-tools-partial/lock"
    assert place.as_single_file().stage().lock.key == "a/.out.ckpt-tools-partial/lock"
    memory = FsspecOutputLocation.of("memory://a/out", {})
    assert [each.partial_folder for each in memory.stage_both_forms()] == [
        "/a/out/.ckpt-tools-partial",
        "/a/.out.ckpt-tools-partial",
    ]


@pytest.mark.parametrize("is_taken", [False, True])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("kinds", [[], ["file"], ["folder"], ["file", "folder"]])
def test_the_rule_of_what_may_take_a_place(kinds, kind, is_taken, overwrite):
    """Nothing goes unasked, and no file for a folder even then."""
    others = {*kinds} - {kind}
    refusal = "exists" if is_taken and not overwrite else f"is a {min(others)}" if others else None
    refused = nullcontext() if refusal is None else pytest.raises(DestinationExistsError, match=refusal)
    with refused:
        check_free("url", kind, is_taken=is_taken, existing_kinds=kinds, overwrite=overwrite)
