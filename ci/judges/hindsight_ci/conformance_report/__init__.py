"""Makes docs/reports/conformance.{json,md} from the reports of `hindsight test`."""
