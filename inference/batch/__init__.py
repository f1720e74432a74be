"""``ckpt-tools predict``: inputs, rows, the pipeline, output files and reports; on one machine or Ray Data."""
