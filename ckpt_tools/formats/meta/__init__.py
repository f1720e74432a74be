"""Meta's files of Llama: ``consolidated.NN.pth`` and ``params.json``."""
