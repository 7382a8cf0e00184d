//! Lets every binary, test and example of this package find libtorch without `LD_LIBRARY_PATH`.
fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if let Ok(lib) = std::env::var("DEP_TCH_LIBTORCH_LIB") {
        let lib = std::fs::canonicalize(&lib).unwrap_or_else(|_| lib.into());
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", lib.display());
    }
}
