"""From a manifest and a layout to tasks: which bytes go where. Pure."""
