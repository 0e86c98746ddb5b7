"""Makes docs/conformance.json and docs/conformance.md from the reports of `hindsight test`."""
