"""`jaxserve.v1`, jaxserve's own gRPC protocol: `inference.proto` and the Python made from it.

Imported by the server (`jaxserve.serve.grpc_inference`) and by clients (`jaxserve.client`); knows nothing of either.
"""
