"""The Open Inference Protocol over gRPC, on the same service functions as HTTP."""
