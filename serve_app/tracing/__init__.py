"""OpenTelemetry's spans, from the ingress to the worker; off unless its variables ask for them."""
