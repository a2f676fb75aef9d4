//! Tests of health, drain and telemetry from outside.
