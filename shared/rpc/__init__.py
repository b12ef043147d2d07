"""gRPC conventions both services share: servers, interceptors, statuses, channels. It knows no tensors."""
