"""Makes conformance.json and conformance.md in docs/reports from the reports of `hindsight test`."""
