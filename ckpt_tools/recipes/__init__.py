"""Recipes: one model in the names and shapes of another trainer or library. Pure.

A recipe pairs names and shapes (``recipe``, read by ``reading``; ``index`` knows them by name, ``pages`` has the text
of those that are built in). ``groups`` finds the tensors that become each other, ``moves`` turns a pair with sizes into
boxes, ``tables`` moves shards by them, ``manifest_builder`` makes the new manifest of these, and ``apply`` adds the
ties of both sides. ``search`` finds the recipes that take given names, and ``like`` makes a manifest like a reference.
"""
