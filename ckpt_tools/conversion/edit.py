"""Application of a conversion's options to its source."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.conversion.target import ConversionTarget
from ckpt_tools.core import transforms
from ckpt_tools.core.applicability import check_applicability
from ckpt_tools.core.apply_options import AppliedOptions, apply_options
from ckpt_tools.core.manifest import Manifest
from ckpt_tools.core.matching import is_selected
from ckpt_tools.core.option_names import format_option
from ckpt_tools.core.options import ConvertOptions, ConvertRequest, ReadOptions
from ckpt_tools.core.quantized import check_companions_selected
from ckpt_tools.core.transforms import TransformResult
from ckpt_tools.errors import CkptError, IncompleteError, UnsupportedError, UsageError
from ckpt_tools.formats.applicability import WRITING_RULES
from ckpt_tools.formats.base import Format
from ckpt_tools.messages.wording import join_names
from ckpt_tools.reading.checkpoint import make_option_case, make_quantize_step, make_recipe_step
from ckpt_tools.reading.model_files import read_model_config
from ckpt_tools.reading.opened import OpenedCheckpoint
from ckpt_tools.runs.opening import open_checkpoint, open_reference_matcher
from ckpt_tools.stores.source import Source
from ckpt_tools.stores.urls import check_not_nested, open_source

if TYPE_CHECKING:
    from ckpt_tools.core.filling import FillStep
    from ckpt_tools.lora.merge import MergeStep
    from ckpt_tools.reading.recipe_step import RecipeStep
    from ckpt_tools.recipes.like import ReferenceMatcher


@dataclass(frozen=True, slots=True)
class EditedCheckpoint:
    """The source after all options: ``manifest`` without values that the format cannot hold, and ``source``, which
    computes the elements of tensors that recipes, merges and references describe."""

    source: Source
    manifest: Manifest
    applied_options: AppliedOptions
    recipe: RecipeStep | None
    like: ReferenceMatcher | None
    merge: MergeStep | None

    @property
    def is_mapped(self) -> bool:
        """Whether tensors were renamed, reshaped or computed, so that one of the source may be none of the output."""
        return any(step is not None for step in (self.recipe, self.like, self.merge))


def open_lora_merge(request: ConvertRequest, opened: OpenedCheckpoint) -> tuple[OpenedCheckpoint, MergeStep | None]:
    """The base model with the adapter's files too, and the step that merges the adapter; ``opened`` itself and None if
    the request has no adapter. A ``config`` folder with settings of the adapter alone is none of the base model's."""
    if request.adapter is None:
        return opened, None
    from ckpt_tools.lora.merge import MergeStep
    from ckpt_tools.reading.adapter import open_adapter
    from ckpt_tools.reading.naming import find_options_to_live_model

    storage_options = request.storage_options
    check_not_nested(request.adapter, request.dst, storage_options)
    opened_adapter = open_checkpoint(
        request.adapter, ReadOptions(), storage_options=storage_options, config_folder=request.config
    )
    adapter = open_adapter(request, opened_adapter, opened.source.store)
    if request.config is not None and read_model_config(open_source(request.config, storage_options)) is None:
        opened = replace(opened, config_folder=None)
    config = opened.find_config() or {}
    find_live_naming = partial(find_options_to_live_model, config)
    merge = MergeStep(adapter.adapter, adapter.config, config, request.untie, request.allow_missing, find_live_naming)
    return replace(opened, source=replace(opened.source, store=adapter.store)), merge


def edit_checkpoint(
    opened: OpenedCheckpoint,
    target: ConversionTarget,
    request: ConvertRequest,
    merge: MergeStep | None,
    fill: FillStep | None,
) -> EditedCheckpoint:
    """Apply the options to the manifest, and refuse those that do not fit it."""
    manifest, writer = opened.manifest, target.writer
    recipe, like = make_recipe_step(opened, request), open_reference_matcher(request)
    case = make_option_case(
        manifest,
        writer.name,
        keeps_both=target.writes_weights_and_masters,
        is_whole_state=target.writes_whole_state,
        has_recipe=request.needs_config,
    )
    check_applicability(WRITING_RULES, request.values_by_name, case)
    if recipe is None:
        _check_quantized_selection(manifest, request)
    try:
        applied = apply_options(
            manifest,
            request,
            writes_all_state=target.writes_whole_state,
            holds_masters=writer.holds_masters,
            keeps_tree=writer.name == manifest.format,
            kept_entries=writer.kept_entries,
            recipe=None if recipe is None else partial(_apply_recipe, recipe, request),
            merge=merge,
            like=like,
            quantize=make_quantize_step(opened, request),
            fill=fill,
        )
    except (UsageError, IncompleteError) as error:
        raise _name_options_in_error(error, request) from error
    manifest, source = applied.manifest, opened.source
    can_hold_values = writer.holds_values == "always" or (
        target.writes_whole_state and writer.holds_values == "with state"
    )
    if manifest.values and not can_hold_values:
        manifest, notes = transforms.drop_values(manifest, target_name=writer.name)
        manifest = replace(manifest, notes=(*manifest.notes, *notes))
    edited = EditedCheckpoint(source, manifest, applied, recipe, like, merge)
    if edited.is_mapped or manifest.computed:
        from ckpt_tools.transfer.computing import add_generated_files

        # The steps only describe what becomes of tensors; from here on the store makes their elements as they are read.
        edited = replace(edited, source=replace(source, store=add_generated_files(source.store, manifest)))
    _check_dtypes(manifest, writer)
    return edited


def _name_options_in_error(error: UsageError | IncompleteError, request: ConvertRequest) -> CkptError:
    """The error with the options that names depend on, because what one makes the other may not find."""
    names = ("drop", "dequantize", "strip", "recipe", "include", "exclude", "rename", "key_map", "like")
    option_fields = (*names, "fill", "quantize")
    given_options = [format_option(name) for name in option_fields if getattr(request, name)]
    unnamed_options = [each for each in given_options if each not in error.message]
    if (
        not unnamed_options
        or (len(given_options) < 2 and request.adapter is None)
        or (isinstance(error, IncompleteError) and request.like is None)
    ):
        return error
    return UsageError(f"{error.message} (with {join_names(unnamed_options)})")


def _check_quantized_selection(manifest: Manifest, options: ConvertOptions) -> None:
    """Raises UsageError if a quantized weight is selected without its scales."""
    if options.include or options.exclude:
        check_companions_selected(manifest, lambda fqn: is_selected(fqn, options.include, options.exclude))


def _apply_recipe(recipe: RecipeStep, options: ConvertOptions, manifest: Manifest) -> TransformResult:
    """The step of a recipe, whose names are those that the user selects by."""
    mapped_manifest, notes = recipe(manifest)
    _check_quantized_selection(mapped_manifest, options)
    return mapped_manifest, notes


def _check_dtypes(manifest: Manifest, writer: Format) -> None:
    """Raises UnsupportedError for a tensor that torch has no dtype for, if the format does not keep it."""
    for key, entry in () if writer.keeps_every_dtype else manifest.tensors.items():
        if not entry.dtype.is_torch_dtype:
            alternative = f"write {format_option('to', 'safetensors')}, or exclude it"
            raise UnsupportedError(f"{writer.name} does not support {entry.dtype.value}; {alternative}", key=str(key))
