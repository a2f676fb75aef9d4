//! Curves over time as SVG.

use std::{fmt::Write, ops::Range};

/// Curves over seconds, with a window that is shaded.
///
/// ```
/// use carrick_testkit::fleet::picture::{Curve, Picture};
///
/// let curve = Curve { name: "ours", values: vec![1.0, 0.5, 1.0], ours: true };
/// let picture = Picture { title: "Goodput", shaded: 1..2, note: "slow", curves: vec![curve] };
/// assert!(picture.svg().starts_with("<svg"));
/// ```
#[derive(Clone, Debug)]
pub struct Picture<'a> {
    /// What is shown.
    pub title: &'a str,
    /// The seconds that are shaded.
    pub shaded: Range<usize>,
    /// What happens in them.
    pub note: &'a str,
    /// Drawn in this order, each over the last.
    pub curves: Vec<Curve<'a>>,
}

/// A curve: a share in [0, 1] for each second.
#[derive(Clone, Debug)]
pub struct Curve<'a> {
    /// What the legend says.
    pub name: &'a str,
    /// Second by second.
    pub values: Vec<f64>,
    /// Whether it is the one to look at: drawn whole, where others are dashed. Dashes tell them apart
    /// without colours.
    pub ours: bool,
}

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
const LEFT: f64 = 62.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 74.0;
const BOTTOM: f64 = 52.0;

/// Attributes are what is drawn where styles are not understood; styles add the dark form.
const STYLE: &str = "<style>
@media (prefers-color-scheme: dark) {
.paper { fill: #0d1117 } .text { fill: #e6edf3 } .axis { stroke: #9198a1 } .grid { stroke: #2a313c }
.window { fill: #4a3a12 } .naive { stroke: #ff8f73 } .ours { stroke: #58b4ff }
}
</style>
";

impl Picture<'_> {
    /// The picture, readable on light and on dark.
    pub fn svg(&self) -> String {
        let mut out = String::new();
        // Writing to a string does not fail.
        self.write(&mut out).ok();
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let title = escape(self.title);
        writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
             width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" \
             font-family=\"system-ui, sans-serif\" font-size=\"13\">\n<title>{title}</title>"
        )?;
        out.push_str(STYLE);
        writeln!(
            out,
            "<rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>"
        )?;
        self.shade(out)?;
        self.axes(out)?;
        text(out, LEFT, 24.0, "start", "font-size=\"16\" font-weight=\"600\"", self.title)?;
        for curve in &self.curves {
            self.curve(out, curve)?;
        }
        self.legend(out)?;
        out.push_str("</svg>\n");
        Ok(())
    }

    fn shade(&self, out: &mut String) -> std::fmt::Result {
        let (from, to) = (self.x(self.shaded.start), self.x(self.shaded.end));
        let (width, height) = (to - from, HEIGHT - TOP - BOTTOM);
        writeln!(
            out,
            "<rect class=\"window\" x=\"{from:.1}\" y=\"{TOP}\" width=\"{width:.1}\" \
             height=\"{height}\" fill=\"#fff1c2\"/>"
        )?;
        text(out, (from + to) / 2.0, TOP - 6.0, "middle", "", self.note)
    }

    fn axes(&self, out: &mut String) -> std::fmt::Result {
        for percent in [0, 25, 50, 75, 100] {
            let y = y(f64::from(percent) / 100.0);
            line(out, "grid", "#d8dee4", (LEFT, y), (WIDTH - RIGHT, y))?;
            text(out, LEFT - 8.0, y + 4.0, "end", "", &format!("{percent} %"))?;
        }
        let step = (self.seconds() / 6).next_multiple_of(10).max(10);
        for second in (0..=self.seconds()).step_by(step) {
            let x = self.x(second);
            line(out, "axis", "#59636e", (x, y(0.0)), (x, y(0.0) + 5.0))?;
            text(out, x, y(0.0) + 20.0, "middle", "", &format!("{second} s"))?;
        }
        line(out, "axis", "#59636e", (LEFT, y(0.0)), (WIDTH - RIGHT, y(0.0)))?;
        line(out, "axis", "#59636e", (LEFT, y(1.0)), (LEFT, y(0.0)))?;
        let label = "calls that were answered, by the second in which they were made";
        text(out, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 10.0, "middle", "", label)
    }

    fn curve(&self, out: &mut String, curve: &Curve<'_>) -> std::fmt::Result {
        let (class, colour, dash) = looks(curve);
        let mut points = String::new();
        for (second, value) in curve.values.iter().enumerate() {
            let (x, y) = (self.x(second) + self.x_step() / 2.0, y(value.clamp(0.0, 1.0)));
            write!(points, "{x:.1},{y:.1} ")?;
        }
        writeln!(
            out,
            "<polyline class=\"{class}\" points=\"{}\" fill=\"none\" stroke=\"{colour}\" \
             stroke-width=\"2.5\" stroke-linejoin=\"round\"{dash}/>",
            points.trim_end()
        )
    }

    fn legend(&self, out: &mut String) -> std::fmt::Result {
        let mut x = LEFT;
        for curve in &self.curves {
            let (class, colour, dash) = looks(curve);
            writeln!(
                out,
                "<line class=\"{class}\" x1=\"{x:.1}\" y1=\"41\" x2=\"{:.1}\" y2=\"41\" \
                 stroke=\"{colour}\" stroke-width=\"2.5\"{dash}/>",
                x + 30.0
            )?;
            text(out, x + 38.0, 45.0, "start", "", curve.name)?;
            // No font tells its widths here; seven a letter is on the wide side.
            x += 38.0 + 7.0 * curve.name.chars().count() as f64 + 24.0;
        }
        Ok(())
    }

    fn seconds(&self) -> usize {
        self.curves.iter().map(|curve| curve.values.len()).max().unwrap_or(0).max(1)
    }

    fn x_step(&self) -> f64 {
        (WIDTH - LEFT - RIGHT) / self.seconds() as f64
    }

    fn x(&self, second: usize) -> f64 {
        LEFT + self.x_step() * second.min(self.seconds()) as f64
    }
}

fn y(share: f64) -> f64 {
    HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
}

fn looks(curve: &Curve<'_>) -> (&'static str, &'static str, &'static str) {
    if curve.ours {
        ("ours", "#0969da", "")
    } else {
        ("naive", "#cf3c1e", " stroke-dasharray=\"7 4\"")
    }
}

fn line(
    out: &mut String,
    class: &str,
    colour: &str,
    (x1, y1): (f64, f64),
    (x2, y2): (f64, f64),
) -> std::fmt::Result {
    writeln!(
        out,
        "<line class=\"{class}\" x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" \
         stroke=\"{colour}\"/>"
    )
}

fn text(
    out: &mut String,
    x: f64,
    y: f64,
    anchor: &str,
    more: &str,
    words: &str,
) -> std::fmt::Result {
    let words = escape(words);
    writeln!(
        out,
        "<text class=\"text\" x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" \
         fill=\"#1f2328\" {more}>{words}</text>"
    )
}

fn escape(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_each_curve_and_nothing_lies_outside_of_it() {
        let curve = |name, values: &[f64]| Curve { name, values: values.to_vec(), ours: true };
        let curves = vec![curve("a < b & c", &[0.0, 2.0, f64::NAN]), curve("none", &[])];
        let svg = Picture { title: "t", shaded: 1..99, note: "n", curves }.svg();
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains("a &lt; b &amp; c") && svg.ends_with("</svg>\n"));
        let xs = svg.split("x2=\"").skip(1).filter_map(|rest| rest.split('"').next());
        assert!(xs.map(|x| x.parse::<f64>().unwrap()).all(|x| (0.0..=WIDTH).contains(&x)));
    }

    #[test]
    fn a_picture_of_nothing_is_a_picture() {
        let svg = Picture { title: "", shaded: 0..0, note: "", curves: Vec::new() }.svg();
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    }
}
