"""The inference engine both services run: sequences, paged KV, batches, attention. It knows no gRPC, no protobuf, no Prometheus."""
