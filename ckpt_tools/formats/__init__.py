"""One package a format: headers to a manifest, a manifest to a layout."""
