"""The service over HTTP: FastAPI application, Open Inference Protocol endpoints and middleware, run by uvicorn."""
