//! Lets every binary, test and example of this package find libtorch without `LD_LIBRARY_PATH`, as docs/how_to/library.md says.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(libtorch) = std::env::var("DEP_ROLLFLOW_LIBTORCH_LIB") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{libtorch}");
        // Copied elsewhere, as bin/rollflow with its libraries in lib.
        println!("cargo::rustc-link-arg-bins=-Wl,-rpath,$ORIGIN/../lib");
    }
}
