//! The drawings of the benchmark page.

#[path = "../../benches/asynchrony/chart.rs"]
mod chart;

use chart::{Chart, Line, Series, median};

fn curve(points: &[(f64, f64)]) -> Chart {
    Chart { series: vec![Series { points: points.to_vec(), ..Series::default() }], ..Chart::default() }
}

#[test]
fn no_finite_point_gives_an_empty_chart() {
    let chart = curve(&[(0.0, f64::NAN), (f64::INFINITY, 1.0), (1.0, f64::MAX), (2.0, f64::MIN)]);
    let svg = Chart { from_zero: true, ..chart }.to_svg();
    assert!(svg.contains("no data") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
}

#[test]
fn all_coordinates_lie_in_the_picture() {
    let number = |of: &str| of.split('"').next().unwrap().parse::<f64>().unwrap();
    let drawn = |chart: Chart| -> Vec<(f64, f64)> {
        let svg = chart.to_svg();
        svg.split("cx=\"").skip(1).map(|rest| (number(rest), number(rest.split_once("cy=\"").unwrap().1))).collect()
    };
    for points in [&[(5.0, 5.0)][..], &[(0.0, 0.0), (1.0, 0.0)], &[(0.0, -1e9), (1e7, 3e-9)], &[(1.0, 1e-12), (2.0, 3e-12)]] {
        let drawn = drawn(curve(points));
        assert_eq!(drawn.len(), points.len());
        assert!(drawn.iter().all(|(x, y)| (64.0..=740.0).contains(x) && (40.0..=292.0).contains(y)), "{drawn:?}");
    }
    let many: Vec<(f64, f64)> = (0..100_000).map(|step| (f64::from(step), f64::from(step).sin())).collect();
    assert!(drawn(curve(&many)).len() <= 1000, "thinning keeps the file small");
}

#[test]
fn several_series_have_their_own_colours_and_lines_through_their_medians() {
    assert_eq!((median(vec![3.0, 9.0, 4.0]), median(vec![5.0, 6.0])), (4.0, 5.5));
    let series = |name: &str, points: Vec<(f64, f64)>| Series { name: name.into(), points, line: Line::Medians };
    let repeated = vec![(0.0, 3.0), (0.0, 9.0), (0.0, 4.0), (1.0, 5.0), (1.0, 6.0)];
    let chart = Chart { series: vec![series("a<b", repeated), series("c", vec![(2.0, 7.0)])], ..Chart::default() };
    let svg = chart.to_svg();
    for (part, times) in [("<circle", 6), ("<polyline", 2), ("class=\"c0\"", 2), ("class=\"c1\"", 2), (">a&lt;b<", 1), (">0<", 0)]
    {
        assert_eq!(svg.matches(part).count(), times, "{part} in {svg}");
    }
    assert_eq!(Chart { from_zero: true, ..chart }.to_svg().matches(">0<").count(), 1, "the axis begins at zero");
}

#[test]
fn ticks_are_round_and_enclose_the_values() {
    for (low, high, ticks) in
        [(0.1, 0.8, &["0.0", "0.2", "0.4", "0.6", "0.8"][..]), (-3.0, 400.0, &["-100", "0", "100", "200", "300", "400"])]
    {
        let svg = curve(&[(7.0, low), (7.0, high)]).to_svg();
        let labels = svg.split("text-anchor=\"end\">").skip(1).map(|rest| rest.split('<').next().unwrap());
        assert_eq!(labels.collect::<Vec<_>>(), ticks);
    }
}
