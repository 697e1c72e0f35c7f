from spider.cli.main import main

main()
