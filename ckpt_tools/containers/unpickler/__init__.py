"""The pickle machine: opcodes interpreted into inert values (see ``containers.pickles``)."""
